"""How a peer answers `peers.py`: a JSON object a line, of which the first makes it."""

import json
import os
import sys


def answer(make):
    """`make(**first order)` gives (version, work); then `work(**order)` gives each answer.

    What libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    orders = map(json.loads, sys.stdin)
    version, work = make(**next(orders))
    print(json.dumps({"version": version}), file=answers, flush=True)
    for order in orders:
        print(json.dumps(work(**order)), file=answers, flush=True)
