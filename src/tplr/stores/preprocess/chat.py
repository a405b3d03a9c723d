"""Renders whole conversations and finds the characters that are trained on: by the template's generation markers, or
by differences between renderings."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tplr.errors import DataError
from tplr.stores.preprocess.tokenizing import Ranges, RecordTokenizer

Message = Mapping[str, Any]

_PROBE = "\ufdd0"  # a noncharacter: no text holds it


class NoMask(DataError):
    """The trained part of a conversation can't be distinguished from the rest."""


class TextSpan(NamedTuple):
    """A text that is encoded as a whole. ``train``: all of it is trained on; else only the characters in ``ranges``.

    ``special``: encode it with the tokenizer's special tokens.
    """

    text: str
    train: bool
    special: bool = False
    ranges: Ranges = ()


def chat_spans(
    tokenizing: RecordTokenizer,
    messages: Sequence[Message],
    train: Sequence[bool] | None,
    context: Sequence[Message] = (),
) -> list[TextSpan]:
    """Return the text of ``messages``, which follow ``context``; those with ``train`` are trained on. None: all.

    Neither the header of a trained assistant message nor a default system prompt is trained on. A template that renders
    a conversation message by message gives one span per message, any other template a single span.

    Raises:
        NoMask: trained and masked messages can't be separated.
        DataError: the template refuses the conversation.
    """
    chat = _Conversation(tokenizing, [*context, *messages])
    first = chat.boundary(len(context)) if context else 0
    if first is None:
        raise chat.no_mask(len(context))
    if train is None:
        ranges: Ranges = ((first, len(chat.text)),)
    else:
        ranges = chat.ranges([False] * len(context) + [*train])
    edges = [edge for edge in chat.edges or (0, len(chat.text)) if edge > first]
    return [_span(chat.text, a, b, ranges) for a, b in pairwise([first, *edges])]


def _span(text: str, begin: int, end: int, ranges: Ranges) -> TextSpan:
    inside = tuple((max(a, begin) - begin, min(b, end) - begin) for a, b in ranges if a < end and b > begin)
    whole = inside == ((0, end - begin),)
    return TextSpan(text[begin:end], whole, ranges=() if whole else inside)


class _Conversation:
    """The messages of a conversation, and its whole text."""

    def __init__(self, tokenizing: RecordTokenizer, messages: Sequence[Message]) -> None:
        self._tokenizing = tokenizing
        self._messages = messages
        self.text = tokenizing.render(messages)

    @cached_property
    def edges(self) -> list[int]:
        """Return each message's begin, and the end, if the text equals the joined single renderings; else []."""
        if len(self._messages) == 1:
            return []  # a default system prompt may come first
        alone: list[str] = []
        for message in self._messages:
            alone.append(self._attempt([message]) or "")
            if not self.text.startswith(alone[-1], sum(map(len, alone[:-1]))):
                return []
        edges = [0, *accumulate(map(len, alone))]
        return edges if edges[-1] == len(self.text) else []

    def boundary(self, i: int) -> int | None:
        """Return the begin of message ``i``; None if the renderings don't show it."""
        if self.edges:
            return self.edges[i]
        if i == len(self._messages):
            return len(self.text)
        before = self._attempt(self._messages[:i]) if i else None
        return len(before) if before and self.text.startswith(before) else None

    def ranges(self, train: Sequence[bool]) -> Ranges:
        """Return the trained ranges of characters."""
        trained = [i for i, verdict in enumerate(train) if verdict]
        assistants = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]
        if trained and {*trained} <= {*assistants}:
            marked = self._tokenizing.generated(self._messages)
            if marked and trained == assistants:
                return marked
            if marked and len(marked) == len(assistants):
                return tuple(marked[assistants.index(i)] for i in trained)
        return tuple((self._start(i), self._end(i)) for i in trained)

    def no_mask(self, i: int) -> NoMask:
        """Return the error for message ``i``."""
        return NoMask(
            f"{self._tokenizing.template_name} does not render the first messages of a conversation as it begins (at "
            f"message {i + 1}); mark what the assistant writes with {{% generation %}} and {{% endgeneration %}} in "
            "the template, or train on all messages"
        )

    def _start(self, i: int) -> int:
        """Return the begin of the trained text of message ``i``: after its header, for an assistant message."""
        begin = self.boundary(i)
        if self._messages[i]["role"] == "assistant":
            if prompt := self._prompt(i):
                if self.text.startswith(prompt):
                    return len(prompt)
                # The prompt begins text that this message lacks, for instance reasoning.
                begin = begin if begin is None else len(_common(self.text, prompt, self._probed(i)))
        elif begin is None and i == 0:  # a default system prompt may come first
            before = _common(self.text, self._probed(i))
            begin = len(before.removesuffix(self._header(self._messages[i]["role"])))
        if begin is None:
            raise self.no_mask(i)
        return begin

    def _prompt(self, i: int) -> str | None:
        """Return the prompt for the assistant's message ``i``."""
        if not self.edges:
            return self._attempt(self._messages[:i], prompt=True) if i else _common(self.text, self._probed(0))
        asking = self._attempt(self._messages, prompt=True) or ""
        return self.text[: self.edges[i]] + asking.removeprefix(self.text) if asking.startswith(self.text) else None

    def _header(self, role: str) -> str:
        """Return the template's text before the content of a message in the middle; empty if it can't be determined."""
        opening = [{"role": role, "content": "?"}, {"role": "assistant", "content": "?"}]
        for messages in (opening[:1], opening):  # some templates demand alternating roles
            before, text = self._attempt(messages), self._attempt([*messages, {"role": role, "content": _PROBE}])
            if before and text and text.startswith(before):
                return text.removeprefix(before).partition(_PROBE)[0]
        return ""

    def _end(self, i: int) -> int:
        """Return the end of message ``i``."""
        if (end := self.boundary(i + 1)) is not None:
            return end
        # The last message may be rendered differently: the text after its content there must follow it here, too.
        probe, last = self._probed(i), self._probed(i, last=True)
        rest = _common(self.text[::-1], probe[::-1])[::-1]
        tail = last.rpartition(_PROBE)[2]
        if not rest.startswith(tail) or _PROBE not in probe or _PROBE not in last:
            raise self.no_mask(i)
        return len(self.text) - len(rest) + len(tail)

    def _probed(self, i: int, *, last: bool = False) -> str:
        """Return the text with another content of message ``i``; ``last``: without the following messages."""
        probe = {"role": self._messages[i]["role"], "content": _PROBE}
        text = self._attempt([*self._messages[:i], probe, *([] if last else self._messages[i + 1 :])])
        if text is None:
            raise self.no_mask(i)
        return text

    def _attempt(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self._tokenizing.render(messages, prompt=prompt)
        except DataError:
            return None


def _common(*texts: str) -> str:
    """Return the longest common prefix."""
    low, high = min(texts), max(texts)
    return low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]
