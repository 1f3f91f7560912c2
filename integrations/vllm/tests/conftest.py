"""Triton reads this when it is first imported: its kernels run in its interpreter here."""

import os

os.environ["TRITON_INTERPRET"] = "1"
