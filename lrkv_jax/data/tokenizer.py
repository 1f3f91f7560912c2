"""Text to token ids and back, and the number of UTF-8 bytes of each token."""

import functools
import gzip
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrkv_jax import files
from lrkv_jax.data.assets import read_asset
from lrkv_jax.distributed.hardware import usable_cores
from lrkv_jax.errors import LrkvError

if TYPE_CHECKING:
    from lrkv_jax.data.chat_template import ChatTemplate

EMBEDDED = ("sotu-4096", "gpt2")
# The special tokens of a chat, except for BOS; nanochat's names.
CHAT_NAMES = tuple(
    f"<|{what}_{end}|>"
    for what in ("user", "assistant", "python", "output")
    for end in ("start", "end")
)
BOS_NAMES = ("<|bos|>", "<|endoftext|>", "<s>")
# What ends a turn in ChatML and in Llama 3, whatever end a tokenizer names.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")

MOST_IDS = 2**24  # of a tokenizer; the largest that are known have 2^18

# GPT-2's 50257 entries padded to a multiple of 128 for the matrix units; nanoGPT does the same.
GPT2_VOCABULARY = 50304
_GPT2_BOS = 50256
_GPT2_CHAT = {name: _GPT2_BOS + 1 + n for n, name in enumerate(CHAT_NAMES)}  # ids that are free
# The pattern of encoder.py in GPT-2's repository, with the alternatives for contractions merged.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# tiktoken's regular expressions panic (not an Exception) on about half a million spaces in a row.
_LONGEST_SPACE = 100_000
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_LONGEST_SPACE},}}")

# What a tokenizer.json must decode unchanged: spaces of every kind, scripts, its stand-ins.
_PROBE = "  a  b\n\n\tc \r\n" + "".join(map(chr, range(384))) + " ▁ 日本 👩‍👩 e\u0301 12 "

Encode = Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]


class Tokenizer:
    """A byte-level tokenizer: `decode(encode(text)) == text` for any text.

    name: the name that `load_tokenizer` was called with.
    vocabulary: size of the id space, V; some ids may be unused.
    bos: the id that starts a document; no text ever encodes to it.
    token_bytes: int32 [V], UTF-8 bytes of each token; 0 for special and unused ids, so a
      zero marks what bits per byte must not count.
    chat: the ids of `CHAT_NAMES` that it has, by name: all, or none.
    begins: whether a chat starts with BOS.
    prefix: the ids of an empty text, which a model cannot read.
    eos_token_ids: those after which a text is over.
    template: the chat template that an imported model brings.
    fingerprint: sha256 (hex) of everything that decides which ids a text gets.
    """

    def __init__(
        self,
        name: str,
        encode: Encode,
        pieces: Sequence[bytes],
        bos: int,
        definition: bytes,
        chat: Mapping[str, int] | None = None,
        begins: bool = True,
        prefix: int | None = None,
        eos_token_ids: Sequence[int] = (),
        processed: Callable[[str], list[int]] | None = None,
        framed: Callable[[str], list[int]] | None = None,
        template: "ChatTemplate | None" = None,
    ):
        self.name, self.begins, self.template = name, begins, template
        self.prefix = bos if prefix is None else prefix
        self.eos_token_ids = tuple(dict.fromkeys((bos, *eos_token_ids)))
        self._processed, self._framed = processed, framed
        self.vocabulary = len(pieces)
        self.bos = bos
        self.chat = dict(chat or {})
        self.token_bytes = np.array([len(piece) for piece in pieces], np.int32)
        self.token_bytes.flags.writeable = False
        self._encode = encode
        self._pieces = pieces
        header = f"{self.vocabulary} {bos}\n".encode()
        self.fingerprint = hashlib.sha256(header + definition).hexdigest()

    @property
    def imported(self) -> bool:
        """Whether it came with a model."""
        return self._processed is not None

    def token_bytes_up_to(self, vocabulary: int) -> np.ndarray:
        """`token_bytes` for a model of at least as many ids; ids past the tokenizer's count 0."""
        return np.pad(self.token_bytes, (0, vocabulary - self.vocabulary))

    def encode(self, text: str) -> np.ndarray:
        """int32 [T], without BOS. A special token spelled out in the text is ordinary text.

        Lone surrogates, which are no characters, are read as U+FFFD.
        """
        return self.encode_batch([text])[0]

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, as `encode` has them."""
        return self.encode(text).tolist()

    def encode_batch(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Encode each text."""
        return [np.array(ids, np.int32) for ids in self._encode([valid(text) for text in texts])]

    def prompt(self, text: str) -> list[int]:
        """The ids of a text that a model is to continue, as a document begins.

        BOS and the text's; of an imported tokenizer what its post-processor makes
        of the text, which may put nothing before it. An empty text is `prefix`.
        """
        if self._processed is None:
            return [self.bos, *self(text)]
        return self._processed(valid(text)) or [self.prefix]

    def encode_framed(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are themselves, as a chat template writes it.

        Raises `LrkvError` for a tokenizer without a template.
        """
        if self._framed is None:
            raise LrkvError(f"tokenizer {self.name} has no chat template: use its chat's tokens")
        return self._framed(valid(text))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids; special, unused and unknown ids have none."""
        return b"".join(self._pieces[i] for i in map(int, ids) if 0 <= i < self.vocabulary)

    def decode(self, ids: Iterable[int]) -> str:
        """`decode_bytes` as text; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, vocabulary={self.vocabulary}, bos={self.bos})"


def valid(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and UTF-8 cannot, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer "sotu-4096", "gpt2", or that of a byte-level tokenizer.json (HF format).

    A folder holds another model's tokenizer (`foreign_tokenizer`).

    "gpt2" is tiktoken on the merges that ship with the package; its vocabulary is
    padded to 50304. A file's BOS is the first special token that it has of <|bos|>,
    <|endoftext|>, <s>. One that does not give every text back as it was is refused.

    Raises LrkvError for an unknown name and for a file that is not such a tokenizer.
    """
    if name_or_path == "sotu-4096":
        return tokenizer_from_json(name_or_path, read_asset("sotu-4096.json"))
    if name_or_path == "gpt2":
        return _gpt2(read_asset("gpt2.bpe.gz"))
    if os.path.isdir(name_or_path):
        return foreign_tokenizer(name_or_path)
    try:
        content = Path(name_or_path).read_bytes()
    except (OSError, ValueError):  # ValueError: a path that no file system takes
        known = ", ".join(EMBEDDED)
        raise LrkvError(
            f"data.tokenizer = {name_or_path} is neither a known name nor a readable file: "
            f"use {known} or the path of a tokenizer.json"
        ) from None
    return tokenizer_from_json(name_or_path, content)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: bytes_to_unicode of its encoder.py, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _to_bytes(token: str) -> bytes:
    return bytes(_ALPHABET[character] for character in token)


@functools.lru_cache(maxsize=1)
def _gpt2(packed: bytes) -> Tokenizer:
    import tiktoken

    merges = gzip.decompress(packed)
    # Ids: the 256 bytes in the alphabet's order, then each merge's result in the file's order.
    pieces = [bytes([byte]) for byte in _ALPHABET.values()]
    for line in merges.decode().split("\n")[1:-1]:
        left, right = line.split(" ")
        pieces.append(_to_bytes(left) + _to_bytes(right))
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=_GPT2_PATTERN,
        mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
        special_tokens={"<|endoftext|>": _GPT2_BOS},
    )
    assert len(pieces) == _GPT2_BOS
    pieces += [b""] * (GPT2_VOCABULARY - len(pieces))

    def encode_one(text: str) -> np.ndarray:
        # As an array: through a list of Python integers it takes a sixth longer.
        parts = [
            encoding.encode_to_numpy(part, disallowed_special=()) for part in _cut_long_space(text)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode(texts: list[str]) -> list[np.ndarray]:
        threads = min(_threads(), len(texts))
        if threads <= 1:
            return [encode_one(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(encode_one, texts))

    return Tokenizer("gpt2", encode, pieces, _GPT2_BOS, merges, _GPT2_CHAT)


def _threads() -> int:
    """The number of threads that HF tokenizers use: their variable's, or one per usable core."""
    named = os.environ.get("RAYON_NUM_THREADS", "")
    return int(named) if named.isdecimal() and int(named) else usable_cores()


def _cut_long_space(text: str) -> list[str]:
    """The text in pieces, none with more than `_LONGEST_SPACE` spaces in a row; mostly one."""
    if len(text) < _LONGEST_SPACE:
        return [text]
    runs = (range(run.start(), run.end(), _LONGEST_SPACE) for run in _LONG_SPACE.finditer(text))
    cuts = [0, *itertools.chain.from_iterable(runs), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


# Keyed by content, so that a file that changes is read again.
@functools.lru_cache(maxsize=4)
def tokenizer_from_json(name: str, content: bytes) -> Tokenizer:
    """The tokenizer that a tokenizer.json's content defines; raises like `load_tokenizer`."""
    what = f"data.tokenizer = {name}"
    backend, ids, special, pieces = _read_backend(what, content)
    missing = 256 - len({piece for piece in pieces if len(piece) == 1})
    if missing:
        raise LrkvError(f"{what} lacks {missing} of the 256 bytes: train it with all of them")
    bos = next((ids[token] for token in BOS_NAMES if token in special), None)
    if bos is None:
        names = " or ".join(BOS_NAMES)
        raise LrkvError(f"{what} has no special token to start a document: add {names}")
    chat = {name: ids[name] for name in CHAT_NAMES if name in special}
    if chat and len(chat) < len(CHAT_NAMES):
        lacking = ", ".join(name for name in CHAT_NAMES if name not in chat)
        raise LrkvError(f"{what} has some of the chat's tokens and lacks {lacking}: add them")
    tokenizer = Tokenizer(name, _encoder(backend), pieces, bos, content, chat)
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        raise LrkvError(
            f"{what} does not give text back as it was: it needs one ByteLevel pre-tokenizer "
            "without a prefix space, and nothing that changes, removes or replaces text"
        )
    return tokenizer


def _read_backend(what: str, content: bytes) -> tuple[Any, dict[str, int], set[str], list[bytes]]:
    """A tokenizer.json in the library: itself, ids by name, special tokens, and each id's bytes.

    Raises LrkvError for what the library cannot read, and for entries that are not made of bytes.
    """
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise LrkvError(f"{what} is not a tokenizer.json ({error}): fetch it again") from None
    backend.no_truncation()
    backend.no_padding()
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    ids = backend.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=0)
    if largest >= MOST_IDS:
        raise LrkvError(f"{what} has ids up to {largest}, beyond {MOST_IDS}: fetch it again")
    pieces = [b""] * (largest + 1)
    byte_level = '"ByteLevel"' in content.decode()
    special = {token for token, is_special in added.items() if is_special}
    for token, i in ids.items():
        if token in special:
            continue
        try:
            plain = token in added or not byte_level
            pieces[i] = _plain_bytes(token) if plain else _to_bytes(token)
        except KeyError:
            raise LrkvError(
                f"{what} is not made of bytes, its entry {token!r} is not: take another"
            ) from None
    return backend, ids, special, pieces


def _encoder(backend: Any) -> Encode:
    """What encodes texts with a tokenizer of the library; no text becomes a special token."""
    backend.encode_special_tokens = True

    def encode(texts: list[str]) -> list[Sequence[int]]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode


def foreign_tokenizer(folder: str, warn: Callable[[str], None] = lambda _: None) -> Tokenizer:
    """The tokenizer of another model's folder, taken as it is: some texts may not come back.

    Its normalizer and its splitting stay, and bytes may lack; `warn` gets a line for each such. A
    document starts with the token that it puts before a text, or else with its end-of-text.

    Raises LrkvError for a folder without one, and for one that is not made of bytes.
    """
    from lrkv_jax.data.chat_template import template_of

    what = f"tokenizer {folder}"
    settings_path = Path(folder) / "tokenizer_config.json"
    settings = files.read_json(settings_path, "fetch it again") or {}
    settings_content = settings_path.read_bytes() if settings else b"{}"
    try:
        content = (Path(folder) / "tokenizer.json").read_bytes()
    except OSError as error:
        raise LrkvError(
            f"{what} has no readable tokenizer.json ({error.strerror}): fetch it again"
        ) from None
    backend, ids, special, pieces = _read_backend(what, content)
    if missing := 256 - len({piece for piece in pieces if len(piece) == 1}):
        warn(f"{what} lacks {missing} of the 256 bytes: texts with those do not come back")
    if backend.normalizer is not None:
        warn(f"{what} changes texts before it reads them: they come back as it reads them")
    before = backend.encode("", add_special_tokens=True).ids
    bos_name, end_name = (_named(settings, key, what) for key in ("bos_token", "eos_token"))
    begins = bool(before)
    names = [bos_name, end_name] if begins else [*BOS_NAMES, end_name, bos_name]
    found = before[:1] or [ids[name] for name in names if name in ids]
    if not found:
        raise LrkvError(f"{what} has no token to start a document: name its bos_token")

    @functools.cache
    def with_special_tokens():
        return _read_backend(what, content)[0]

    chat = CHAT_NAMES if special.issuperset(CHAT_NAMES) else ()
    ends = [ids[end_name]] if end_name in ids else []
    turn_ends = [ids[name] for name in TURN_ENDS if name in special]
    return Tokenizer(
        folder, _encoder(backend), pieces, found[0], content + settings_content,
        {name: ids[name] for name in chat}, begins,
        prefix=next((ids[name] for name in (bos_name, end_name) if name in ids), found[0]),
        eos_token_ids=[*ends, *_generation_ends(Path(folder), len(pieces)), *turn_ends],
        processed=lambda text: backend.encode(text, add_special_tokens=True).ids,
        framed=lambda text: with_special_tokens().encode(text, add_special_tokens=False).ids,
        template=template_of(Path(folder), sorted(special)),
    )  # fmt: skip


def _generation_ends(folder: Path, vocabulary: int) -> list[int]:
    """The ids that generation_config.json ends a text with."""
    path = folder / "generation_config.json"
    named = (files.read_json(path, "delete it") or {}).get("eos_token_id")
    listed = named if isinstance(named, list) else [] if named is None else [named]
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocabulary:
            raise LrkvError(f"{path}: eos_token_id = {str(one)[:60]} is no id: fix or delete it")
    return listed


def _named(settings: Mapping[str, Any], key: str, what: str) -> str | None:
    """The special token that tokenizer_config.json has under a key, None for none."""
    name = settings.get(key)
    name = name.get("content") if isinstance(name, dict) else name
    if name is not None and not isinstance(name, str):
        raise LrkvError(f"{what}: {key} = {str(name)[:60]} is no text: fetch it again")
    return name


def _plain_bytes(token: str) -> bytes:
    """The bytes of an entry that is text, with SentencePiece's space, or <0x0A>."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
