"""The paper's tables and figures, and those beside them: a file for each subject.

Each function registers what it makes (`lrkv_jax.lab.report.page.report_item`);
`REPORT_ITEMS` are all of them in the order of a page. `lrkv report RUN...` makes them.
"""

from importlib import import_module
from pkgutil import iter_modules

from lrkv_jax.lab.report.page import registered

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)

REPORT_ITEMS = registered()
