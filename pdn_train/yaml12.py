"""YAML as version 1.2 reads numbers and booleans: 3e-4 is a float, 012 and off are text. No duplicate keys."""

from __future__ import annotations

import re

import yaml


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core numbers and booleans, refusing duplicate keys."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # what the constructors raise of !!int abc, !!int "" and !!timestamp abc
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {node.value!r} is no {tag}; mend it or leave the tag out") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(
                    f"line {key_node.start_mark.line + 1}: a key is a name, not a list or a mapping; quote a value with braces"
                )
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key '{key}' stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9]*\.[0-9]+|[0-9]+\.?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class Dumper(yaml.SafeDumper):
    """Quotes the text that the loader would take for a number, such as 1e4."""


Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
# YAML's own float constructor accepts what the pattern lets through; leading zeros such as 012 must not reach it as 12.0
Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: _number(loader.construct_scalar(node)))


def _number(text: str) -> float | str:
    return text if re.match(r"^[-+]?0[0-9]+$", text) else float(text)
