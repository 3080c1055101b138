"""Ask the questions of ``config init`` in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_ckpt.config.questions import QUESTIONS, Question
from fsdp_ckpt.config.rules import shown

__all__ = ["ask_all"]

_BACK = object()


def ask_all(given: dict[str, Any], read_line: Callable[[str], str], say: Callable[[str], None]) -> dict[str, Any]:
    """Ask everything that is not given, and return all answers by name.

    Args:
        given: Answers that are known, by ``--set``.
        read_line: Shows a prompt and returns a line; ``EOFError`` ends everything.
        say: Shows a line.
    """
    say("Enter takes the value in brackets. ? explains, < goes back, Ctrl-C ends without writing.")
    answers: dict[str, Any] = dict(given)
    asked: list[str] = []
    position = 0
    while position < len(QUESTIONS):
        question = QUESTIONS[position]
        position += 1
        if question.name in given or not question.is_asked(answers):
            if question.name not in given:
                answers.pop(question.name, None)  # answered before a step back made it pointless
            continue
        answer = _ask(question, answers, read_line, say)
        if answer is not _BACK:
            answers[question.name] = answer
            asked.append(question.name)
        elif asked:
            last = asked.pop()
            position = next(i for i, one in enumerate(QUESTIONS) if one.name == last)
        else:
            position -= 1
            say("  this is the first question")
    return answers


def _ask(
    question: Question, answers: dict[str, Any], read_line: Callable[[str], str], say: Callable[[str], None]
) -> Any:
    default = answers.get(question.name, question.default(answers))
    say("")
    say(question.text)
    width = max((len(name) for name in question.choices), default=0)
    for number, (name, words) in enumerate(question.choices.items(), 1):
        label = "  " if name == str(number) else f"  {number}  "
        say(f"{label}{name:{width}}  {words}")
    while True:
        line = read_line(f"[{_default_text(default)}] ").strip()
        if line == "<":
            return _BACK
        if line == "?":
            say(f"  {question.help or 'There is nothing more to say about this.'}")
            continue
        if not line and default is not None:
            return default
        if not line:
            say("  this has no default: an answer is needed")
            continue
        try:
            return question.read(_by_number(question, line))
        except ValueError as error:
            say(f"  {line or 'nothing'!r} is not possible; {error}")


def _by_number(question: Question, line: str) -> str:
    """Numbers are those of the list on the screen."""
    names = list(question.choices)
    return names[int(line) - 1] if line.isdecimal() and 1 <= int(line) <= len(names) else line


def _default_text(default: Any) -> str:
    if default is None:
        return "needed"
    if isinstance(default, tuple):
        return ",".join(default) or "the model's _no_split_modules"
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else shown(default)
