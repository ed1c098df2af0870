"""The chat template of a model: messages in, the text that it was trained to continue out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planner.errors import Fault, InputError


class ChatTemplate:
    """A Jinja template with what those of Hugging Face checkpoints expect around it. It comes from a file of somebody
    else's, so it runs in a sandbox: it can reach no attribute of Python's own and change nothing that it is given.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], file: str = ""):
        self._file, self._tokens = file, dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(Fault(f"chat template, line {error.lineno}: {error.message}", file)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, up to where the model's answer begins. Raises InputError when the template
        refuses the messages or cannot make sense of them.
        """
        known = {**self._tokens, "tools": tools, "documents": None, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise InputError(Fault(f"chat template: {why}", self._file)) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training; what is between is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON as a model was trained on it: jinja2's own filter would write `<` as an escape for HTML."""
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
