"""A byte-level BPE tokenizer of any size, learnt from the user's text."""

from collections.abc import Callable, Iterable, Iterator

from lrkv_jax.data.tokenizer import CHAT_NAMES, MOST_IDS, valid
from lrkv_jax.errors import LrkvError

# To start a document, and to mark the turns and the tool calls of a conversation.
SPECIAL_TOKENS = ("<|bos|>", *CHAT_NAMES)
SMALLEST = 256 + len(SPECIAL_TOKENS)

# cl100k_base's, of tiktoken's openai_public.py: contractions in either case, up to three digits,
# punctuation with the line ends after it, and one space or mark before a word.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str],
    vocabulary: int,
    *,
    progress: Callable[[int], None] | None = None,
    show_merging: bool = False,
) -> str:
    """Return a tokenizer.json of exactly `vocabulary` entries: special tokens, 256 bytes, merges.

    The same texts in the same order give the same file, and any text comes back as it was.
    Text is cut before merging as GPT-4 does. progress(bytes): called after each text with the UTF-8
    bytes so far. show_merging: the library's bar while it learns.

    Raises LrkvError for a size outside SMALLEST to MOST_IDS and for text that has too
    few merges to fill it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < SMALLEST:
        raise LrkvError(
            f"a vocabulary of {vocabulary} is too small for 256 bytes and {len(SPECIAL_TOKENS)} "
            f"special tokens: use {SMALLEST} or more"
        )
    if vocabulary > MOST_IDS:  # the library reserves memory for all of it at once
        raise LrkvError(f"a vocabulary of {vocabulary} is too large: use {MOST_IDS} or less")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT4), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        # All 256 bytes, seen or not, so that any text round-trips.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_merging,
    )
    tokenizer.train_from_iterator(_reported(texts, progress), trainer)
    learnt = tokenizer.get_vocab_size()
    if learnt != vocabulary:
        raise LrkvError(
            f"the text has merges for a vocabulary of {learnt}, not {vocabulary}: use at most that "
            "many, or more text"
        )
    return tokenizer.to_str() + "\n"


def _reported(texts: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    size = 0
    for text in map(valid, texts):
        size += len(text.encode())
        yield text
        if progress is not None:
            progress(size)


def up_to(texts: Iterable[str], size: int | None) -> Iterator[str]:
    """Yield the first texts, about `size` UTF-8 bytes in all; every text if `size` is None."""
    for text in texts:
        yield text
        if size is not None:
            size -= len(text.encode())
            if size <= 0:
                return
