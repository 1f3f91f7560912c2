"""Processes that cannot become one run say why, all of them, in a line."""

import socket
import threading
import time

import pytest
from support.several import free_port

from lrkv_jax.errors import LrkvError
from lrkv_jax.runtime import meeting
from lrkv_jax.runtime.hosts import Place
from lrkv_jax.runtime.meeting import meet


def gather(places, seconds=5.0, delays=None):
    """What `meet` returned or raised in each place, each in a thread of its own."""
    results = [None] * len(places)

    def come(number):
        time.sleep((delays or {}).get(number, 0))
        try:
            results[number] = meet(places[number], seconds=seconds)
        except LrkvError as error:
            results[number] = error

    threads = [threading.Thread(target=come, args=(n,)) for n in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def places(count, address=None):
    address = address or f"127.0.0.1:{free_port()}"
    return [Place("test", process, count, address) for process in range(count)]


@pytest.mark.parametrize("late", [0, 2])
def test_all_learn_where_each_one_is_and_keep_a_connection_whoever_comes_last(late):
    results = gather(places(3), delays={late: 0.5})
    assert [hosts for hosts, _ in results] == [[socket.gethostname()] * 3] * 3
    (_, calls), *others = results
    for process, (_, theirs) in enumerate(others, 1):
        for one, other in ((calls[process], theirs[0]), (theirs[0], calls[process])):
            one.sendall(b"%d" % process)
            assert other.recv(9) == b"%d" % process
    assert set(calls) == {1, 2}


def test_a_run_of_one_waits_for_nobody():
    assert gather(places(1)) == [([socket.gethostname()], {})]


def test_the_port_is_free_again_at_once_beside_the_connections():
    address, kept = f"127.0.0.1:{free_port()}", []
    for _ in range(3):
        kept += gather(places(2, address))
    assert all(isinstance(r, tuple) for r in kept)
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass


def test_one_that_does_not_come_is_named_to_those_who_did():
    results = gather(places(3)[:2], seconds=1.0)
    for result in results:
        assert "process 2 of 3 did not come" in str(result) and "within 1 s" in str(result)
    assert "\n" not in str(results[0])


def test_a_coordinator_that_is_not_there_is_named():
    (error,) = gather(places(2)[1:], seconds=0.5)
    assert "cannot reach process 0 at 127.0.0.1:" in str(error)
    assert "Connection refused" in str(error) and "LRKV_COORDINATOR" in str(error)


def test_a_coordinator_without_a_name_is_named():
    (error,) = gather(places(2, "no-such-host.invalid:5000")[1:], seconds=0.5)
    assert "cannot reach process 0 at no-such-host.invalid:5000" in str(error)


def test_other_counts_are_refused_in_both():
    first, _ = places(2)
    results = gather([first, Place("test", 1, 3, first.coordinator)])
    for result in results:
        assert "process 1 on" in str(result) and "counts 3 processes" in str(result)


def test_two_with_one_number_are_refused(monkeypatch):
    first, second = places(3)[:2]
    names = iter(["a", "b", "c"])
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: next(names, "later"))
    results = gather([first, second, second], delays={1: 0.2, 2: 0.5})
    assert "two processes are number 1" in str(results[0])
    assert str(results[2]) == str(results[0])


def test_other_versions_of_jax_are_refused(monkeypatch):
    versions = iter(["0.12.0", "0.11.2"])
    monkeypatch.setattr(meeting, "version", lambda _: next(versions))
    results = gather(places(2), delays={1: 0.3})
    for result in results:
        assert "has jax 0.11.2, and process 0 0.12.0" in str(result)


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = gather(places(2, f"127.0.0.1:{port}")[:1], seconds=0.5)
    assert f"port {port} of process 0" in str(error) and "LRKV_COORDINATOR" in str(error)


def test_strangers_are_dropped_and_do_not_count():
    first, second = places(2)
    port = int(first.coordinator.rpartition(":")[2])

    def knock():
        time.sleep(0.3)
        for said in (b"GET / HTTP/1.1\n", b'{"process": 1}\n', b"[]\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)

    thread = threading.Thread(target=knock)
    thread.start()
    results = gather([first, second], delays={1: 0.8})
    thread.join()
    assert all(isinstance(result, tuple) for result in results)
