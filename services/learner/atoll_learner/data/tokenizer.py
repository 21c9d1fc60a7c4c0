"""From text to numbers. Bytes by default; a locally trained byte-pair vocabulary as an extra.

Bytes need no dependency and no training, lose nothing, and make bits per byte the loss itself. Byte 0 separates
documents: text that holds one is refused as binary when it is prepared, so the separator is unambiguous.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError, SettingsError
from atoll.base.files import read_text

BPE_FILE = "tokenizer.json"
TOKENIZER_BYTES_MAX = 128 << 20
"""Several times the largest vocabulary that is published (Gemma's has 33 MB)."""
BYTES = 256
SEPARATOR = "<|doc|>"
USUAL_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """A tokenizer, as far as preparation and sampling need one."""

    @property
    def vocab(self) -> int:
        """Return how many tokens there are."""

    @property
    def separator(self) -> int:
        """Return the token between documents."""

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Return the tokens of a document of UTF-8 text, without separator."""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of `tokens`."""


class ByteTokenizer:
    """Token = byte."""

    vocab = BYTES
    separator = 0

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Return the bytes as numbers."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the numbers as bytes."""
        return bytes(tokens)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A `tokenizer.json` that somebody has, and the token that stands between documents (empty: look for a usual one)."""

    file: Path
    separator: str = ""

    @classmethod
    def of(cls, path: Path, separator: str) -> Vocabulary:
        """Return the vocabulary of a file, or of a model's folder."""
        return cls(path / BPE_FILE if path.is_dir() else path, separator)


class BpeTokenizer:
    """A vocabulary of the `tokenizers` library (extra `bpe`): one that `train_bpe` wrote, or somebody's `tokenizer.json`."""

    def __init__(self, file: Path, separator: str = "") -> None:
        """Load a file; `separator` is the token between documents, found by its usual names if it is empty.

        Raises:
            DataError: the file is no vocabulary, or has no such token.
        """
        library = _tokenizers()
        try:
            self._inner = library.Tokenizer.from_str(read_text(file, TOKENIZER_BYTES_MAX))
        except Exception as error:
            # The library raises bare exceptions.
            raise DataError(
                "this vocabulary cannot be read",
                got=f"{file}: {getattr(error, 'strerror', None) or error}",
                allowed="a tokenizer.json",
                todo="name another",
            ) from error
        self._vocab = 1 + max(self._inner.get_vocab().values(), default=0)
        wanted = (separator,) if separator else USUAL_SEPARATORS
        self.separator_name = next((name for name in wanted if self._inner.token_to_id(name) is not None), "")
        if not self.separator_name:
            raise DataError(
                "this vocabulary has no token to stand between documents",
                got=f"{file}: none of {', '.join(wanted)}",
                todo="name one of its tokens with --separator",
            )

    @property
    def vocab(self) -> int:
        """Return one more than the largest token: a vocabulary that somebody has may leave numbers out."""
        return self._vocab

    @property
    def separator(self) -> int:
        """Return the id of the end-of-document token."""
        return int(self._inner.token_to_id(self.separator_name))

    def encode(self, text: bytes) -> npt.NDArray[np.int64]:
        """Return token ids."""
        return np.array(self._inner.encode(text.decode("utf-8"), add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the text of `tokens` as UTF-8."""
        return str(self._inner.decode(list(tokens))).encode()


def train_bpe(texts: Iterable[str], vocab: int, file: Path) -> BpeTokenizer:
    """Train a vocabulary of `vocab` tokens on `texts`, write it to `file` and return it."""
    if not 300 <= vocab <= 1 << 20:
        raise SettingsError("the vocabulary size is out of range", got=vocab, allowed="300..1048576", todo="set --bpe")
    library = _tokenizers()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.save(str(file))
    return BpeTokenizer(file)


def _tokenizers() -> Any:  # noqa: ANN401  (an optional library)
    try:
        import tokenizers  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise DataError(
            "byte-pair vocabularies need the 'tokenizers' library", todo="pip install 'atoll[bpe]', or use plain bytes"
        ) from error
    return tokenizers
