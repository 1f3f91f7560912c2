"""Tables and figures: how they look, how they are written, and what makes a script one."""

from lrkv_jax.artefacts.artefact import Artefact, Made, command, write
from lrkv_jax.artefacts.cache_axis import CACHE_LABEL, CACHE_NOTE, against_cache
from lrkv_jax.artefacts.correlated import correlated
from lrkv_jax.artefacts.curves import Line, curves, five_variants
from lrkv_jax.artefacts.figure import Picture, empty, legend_below, panels, style, write_picture
from lrkv_jax.artefacts.looks import GREY, Look, ladder, look, name_of
from lrkv_jax.artefacts.losses import COLUMNS as LOSS_COLUMNS
from lrkv_jax.artefacts.losses import NOTE as LOSS_NOTE
from lrkv_jax.artefacts.losses import loss_rows
from lrkv_jax.artefacts.page import Section, page
from lrkv_jax.artefacts.printed import (
    SCALES,
    Printed,
    paper_scale,
    printed,
    printed_table,
    verdict,
)
from lrkv_jax.artefacts.sooner_bars import sooner_bars
from lrkv_jax.artefacts.table import Cell, Column, Row, Table, no_run
from lrkv_jax.artefacts.written import write_table

__all__ = [
    "CACHE_LABEL",
    "CACHE_NOTE",
    "GREY",
    "LOSS_COLUMNS",
    "LOSS_NOTE",
    "SCALES",
    "Artefact",
    "Cell",
    "Column",
    "Line",
    "Look",
    "Made",
    "Picture",
    "Printed",
    "Row",
    "Section",
    "Table",
    "against_cache",
    "command",
    "correlated",
    "curves",
    "empty",
    "five_variants",
    "ladder",
    "legend_below",
    "look",
    "loss_rows",
    "name_of",
    "no_run",
    "page",
    "panels",
    "paper_scale",
    "printed",
    "printed_table",
    "sooner_bars",
    "style",
    "verdict",
    "write",
    "write_picture",
    "write_table",
]
