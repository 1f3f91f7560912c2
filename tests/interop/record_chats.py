"""Record what transformers makes of chats and texts: `python record_chats.py [FOLDER_OF_SMOLLM2]`.

Needs transformers, and tests/ on PYTHONPATH. `recorded_chats.json` holds the chats, the texts, and
for each tokenizer of `support.chat_folders` the rendered chats (null: the template refuses it) and
ids. SmolLM2's own are recorded too where its folder is given; else those that are there stay.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from support.chat_folders import FOLDERS
from transformers import AutoTokenizer

TARGET = Path(__file__).with_name("recorded_chats.json")
WORDS = (
    "the", "state of", "Union,", "cache\n", " 128", "\n\n", "  ", "\t", "it's", "日本", "é",
    "e\u0301", "👩\u200d👩", "don't", "{{ x }}", "{% if %}", "<b>", "&amp;", "'quoted'", '"', "\\n",
    "1,024.5", "ÿ", "…", "A", "▁", "\r\n", "naïve", "Ω≈ç", "def f(x):\n    return x", "#",
    "</think>", "<think>",
)  # fmt: skip


def texts(count):
    draw = random.Random(0)
    made = ["", " ", "\n", "a", "  leading", "trailing  ", "日本語", "\n\n\n"]
    while len(made) < count:
        made.append(
            "".join(draw.choice(["", " "]) + draw.choice(WORDS) for _ in range(draw.randint(1, 7)))
        )
    return made


def chats(count):
    draw, made = random.Random(1), []

    def words():
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 6)))
        return text if text.strip() else "x"

    while len(made) < count:
        turns = [{"role": "system", "content": words()}] if draw.random() < 0.4 else []
        for number in range(2 * draw.randint(0, 2) + 1):
            turns.append({"role": ("user", "assistant")[number % 2], "content": words()})
        if draw.random() < 0.15:  # which some templates refuse
            turns.append({"role": draw.choice(["user", "system"]), "content": words()})
        made.append(turns)
    return made


def recorded(folder, said, asked):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered, ids = [], []
    for turns in said:
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            found = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        except Exception:
            text = found = None
        rendered.append(text)
        ids.append(found)
    return {"chats": rendered, "chat_ids": ids, "text_ids": tokenizer(asked)["input_ids"]}


if __name__ == "__main__":
    before = json.loads(TARGET.read_text())["of"] if TARGET.is_file() else {}
    said, asked = chats(60), texts(500)
    found = {"smollm2": before["smollm2"]} if "smollm2" in before else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in FOLDERS.items():
            found[name] = recorded(make(Path(scratch) / name), said, asked)
    for folder in sys.argv[1:]:
        found["smollm2"] = recorded(folder, said, asked)
    parts = {"messages": said, "texts": asked, "of": found}
    dump = lambda value: json.dumps(value, separators=(",", ":"))  # noqa: E731
    lines = [f'"{n}": {dump(v)}' for n, v in parts.items() if n != "of"]
    of = ",\n".join(f'"{n}": {dump(v)}' for n, v in found.items())
    TARGET.write_text("{\n" + ",\n".join(lines) + f',\n"of": {{\n{of}\n}}\n}}\n')
