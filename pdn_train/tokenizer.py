"""A sentencepiece model as text <-> ids, with the facts the shards record about it: size, special ids, sha256.

`encode` never adds a begin or end id: whoever frames documents (the shard writer) does that once. A model with no end-of-document id
cannot frame documents and is refused at load. Encoding runs in the calling thread, 2 to 5 MB of English a second a core; parallelism is
the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import sentencepiece

# What the usual normalisers damage: line breaks, tabs, runs of spaces (also first and last), ligatures, fractions, combining marks; and
# what a vocabulary without bytes cannot spell.
PROBE = " def f(x):\n\treturn  x\r\n\n  ﬁsh ½ é e\u0301 \u00a0 Ω 漢 🙂\x00 \n"


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message names the file, the fault and the way out."""


@dataclass(frozen=True)
class Tokenizer:
    """Build with `Tokenizer.load`. `bos_id` is None where the model has none; `sha256` is that of the model file."""

    file: Path
    sha256: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    _processor: sentencepiece.SentencePieceProcessor = field(repr=False, compare=False)

    @classmethod
    def load(cls, file: str | Path) -> Tokenizer:
        """Read a sentencepiece model file. Raises TokenizerError where it is missing, no sentencepiece model, or has no end id."""
        try:
            proto = Path(file).read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"cannot read the tokenizer {file}: {error.strerror}; name a sentencepiece model; "
                "`python -m data_prep.tokenizer` trains one"
            ) from error
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(proto)
        except RuntimeError as error:
            raise TokenizerError(f"{file} is not a sentencepiece model ({error}); train one with `python -m data_prep.tokenizer`") from None
        bos, eos = processor.bos_id(), processor.eos_id()
        if eos < 0:
            raise TokenizerError(f"the tokenizer {file} has no end id (eos), so documents cannot be told apart; train it with an eos piece")
        sha256 = hashlib.sha256(proto).hexdigest()
        return cls(Path(file), sha256, processor.vocab_size(), bos if bos >= 0 else None, eos, processor)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added. Text that spells a control piece such as `</s>` gives ordinary ids, never the control id."""
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control ids (bos, eos) give nothing. Raises TokenizerError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"token id {i} is outside the {self.vocab_size} pieces of the tokenizer {self.file}")
        return self._processor.decode(ids)

    def check_lossless(self) -> None:
        """Raise TokenizerError where the model rewrites text: its normaliser, space handling or unknown characters change `PROBE`.

        One character no model gives back, U+2581: sentencepiece spells the space with it.
        """
        back = self.decode(self.encode(PROBE))
        if back != PROBE:
            raise TokenizerError(
                f"the tokenizer {self.file} rewrites text: {PROBE!r} comes back as {back!r}; train one with `python -m "
                "data_prep.tokenizer` (identity normaliser, spaces kept, byte fallback), or accept the loss by leaving --lossless out"
            )
