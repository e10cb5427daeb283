"""Text as it comes, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator

from infer.call import Call
from infer.load import Model
from infer.session import Generation, Session

_PASSES = 4  # of the target between two looks at the text


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new in one row.

    Attributes:
      row: its index.
      text: may be empty where tokens have come whose text is not settled yet.
      token_ids: new tokens; their text may come with a later piece.
    """

    row: int
    text: str
    token_ids: list[int]


class Stream(Iterator[Piece]):
    """Yields pieces; those of a row, joined, are its text and its tokens in `generation`.

    The first piece of each row comes with the prefill. A text appears once no later token can
    change it: a character in full, and nothing that may be the beginning of a stop string. Closing
    the stream, leaving its `with` block or dropping it frees what lies on the device.
    """

    def __init__(self, model: Model, call: Call) -> None:
        self._generation: Generation | None = None
        self._pieces = self._run(model, call)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream; there is no next piece."""
        self._pieces.close()

    @property
    def generation(self) -> Generation:
        """The whole result, after the last piece.

        Raises:
          RuntimeError: the stream has not come to its end.
        """
        if self._generation is None:
            raise RuntimeError("the stream has no result before its last piece")
        return self._generation

    def _run(self, model: Model, call: Call) -> Generator[Piece, None, None]:
        session = Session(model, call)
        rows = len(call.stops)
        sent_text, sent_tokens = [0] * rows, [0] * rows
        while True:
            finished = session.finished
            for row, (text, tokens) in enumerate(
                zip(session.texts, session.token_ids, strict=True)
            ):
                if len(tokens) > sent_tokens[row] or len(text) > sent_text[row]:
                    yield Piece(row, text[sent_text[row] :], tokens[sent_tokens[row] :])
                    sent_text[row], sent_tokens[row] = len(text), len(tokens)
            if all(finished):
                self._generation = session.generation()
                return
            session.advance(_PASSES)
