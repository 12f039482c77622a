"""The recurrences on tensors: reference, chunk algorithm and its stages."""
