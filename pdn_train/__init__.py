"""The training system: configuration, data, model, engine, checkpoints, evaluation."""
