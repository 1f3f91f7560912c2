"""Stages that stand in for those of experiments/first_light_stages.py; nothing loads JAX.

LIGHT_PLACE is where they are measured, LIGHT_ITEMS what they have: `hangs`, `crashes`, `long`, or
names of items that note in the file LIGHT_LOG that they ran.
"""

import os
import time
from functools import partial
from pathlib import Path

import first_light_stages as stages
from first_light_stages import OK, Found, Item


def where():
    if os.environ["LIGHT_PLACE"] == "nowhere":
        os._exit(3)
    return {"device": os.environ["LIGHT_PLACE"], "versions": {}, "sources": "s"}


def works(name):
    with Path(os.environ["LIGHT_LOG"]).open("a") as file:
        file.write(name)
    return Found(OK, "it worked", {"name": name}, [[name]])


def hangs():
    stages.progress("a kernel")
    time.sleep(1000)


def raises():
    raise ValueError("no such\nkernel")


def planted(folder, *, dry):
    special = {
        "hangs": Item("hangs", 0.5, hangs),
        "crashes": Item("crashes", 10, lambda: os._exit(3)),
        "long": Item("long", 100, hangs),
        "raises": Item("raises", 10, raises),
    }
    for name in os.environ["LIGHT_ITEMS"].split():
        yield special.get(name) or Item(name, 10, partial(works, name))


if __name__ == "__main__":
    stages.where, stages.STAGES["decoding"] = where, planted
    stages.main()
