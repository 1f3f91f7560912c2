"""The long tests first, one for each of two workers, so that the short ones even them out."""


def pytest_collection_modifyitems(items):
    long = [item for item in items if "killed_fifteen" in item.name]
    if len(long) != 2 or len(items) < 4:
        return
    rest = [item for item in items if item not in long]
    # With --dist worksteal each worker begins with its half of the list.
    half = (len(items) + 1) // 2
    items[:] = [long[0], *rest[: half - 1], long[1], *rest[half - 1 :]]
