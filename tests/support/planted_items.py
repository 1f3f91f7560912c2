"""Items of a stage of experiments/first_light.py, for its child process; nothing loads JAX."""

import os
import time
from pathlib import Path

from lrkv_jax.doctor.finding import OK, Finding, at


def where(device="a device"):
    return Finding("where", OK, device, "", {"device": device, "versions": {}, "sources": "s"})


def elsewhere():
    return where("another device")


def works(name, log):
    with Path(log).open("a") as file:
        file.write(name)
    return Finding(name, OK, "it worked", "", {"name": name})


def hangs():
    at("a kernel")
    time.sleep(1000)


def crashes():
    os._exit(3)
