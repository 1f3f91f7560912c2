"""Ways in which a checkpoint's directory can go wrong, each drawn at random."""

import shutil
from pathlib import Path


def _files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def _before(step: Path) -> Path:
    there = [int(path.name) for path in step.parent.iterdir()]
    return step.parent / str(max(number for number in there if number < int(step.name)))


def _filled(step: Path) -> list[Path]:
    return [path for path in _files(step) if path.stat().st_size]


def flip(step, rng):
    path = rng.choice(_filled(step))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_in_data(step, rng):
    path = max(_files(step), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(step, rng):
    path = rng.choice(_filled(step))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def extend(step, rng):
    with rng.choice(_files(step)).open("ab") as file:
        file.write(b"\0" * rng.randrange(1, 99))


def delete(step, rng):
    rng.choice(_files(step)).unlink()


def delete_an_item(step, rng):
    shutil.rmtree(rng.choice([path for path in step.iterdir() if path.is_dir()]))


def reorder(step, rng):
    """Two files of one length, or any two, trade places."""
    one, other = rng.sample(_filled(step), 2)
    while one.read_bytes() == other.read_bytes():
        one, other = rng.sample(_filled(step), 2)
    keep = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(keep)


def another_steps_file(step, rng):
    """A file of the step before, in the place of this one's."""
    before = _before(step)
    differ = [
        (path, twin)
        for path in _files(step)
        if (twin := before / path.relative_to(step)).is_file()
        and twin.read_bytes() != path.read_bytes()
    ]
    path, twin = rng.choice(differ)
    path.write_bytes(twin.read_bytes())


def another_step(step, rng):
    """The whole step before, under this one's number."""
    before = _before(step)
    shutil.rmtree(step)
    shutil.copytree(before, step)


def empty(step, rng):
    shutil.rmtree(step)
    step.mkdir()


def no_manifest(step, rng):
    (step / "manifest.json").unlink()


def foreign(step, rng):
    """Something else altogether, in a directory with a number."""
    shutil.rmtree(step)
    step.mkdir()
    (step / "model.safetensors").write_bytes(rng.randbytes(1000))


def a_file(step, rng):
    shutil.rmtree(step)
    step.write_bytes(rng.randbytes(100))


def garbled_manifest(step, rng):
    texts = ["", "{}", "[]", "null", "[" * 100_000, '{"format": 1}', "\0" * 40, '"\ud800"']
    (step / "manifest.json").write_text(rng.choice(texts[:-1]))


ALL = (
    flip, flip_in_data, truncate, extend, delete, delete_an_item, reorder, another_steps_file,
    another_step, empty, no_manifest, foreign, a_file, garbled_manifest,
)  # fmt: skip
