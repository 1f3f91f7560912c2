"""What clients are told: OpenAI's own client reads it, whoever misbehaves changes nothing."""

import asyncio
import contextlib
import dataclasses
import re
import socket
import time
from threading import Event
from unittest.mock import DEFAULT, Mock

import numpy as np
import openai
import pytest
from support.hand_built import calling_run
from support.served import asks, get, idle, post, random_run, raw, served, serving, slow, wait_until

from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.serving import connections
from lrkv_jax.serving import service as service_module
from lrkv_jax.serving.completion import TextDelta
from lrkv_jax.serving.connections import ConnectionLimits
from lrkv_jax.serving.request_schema import CompletionRequest
from lrkv_jax.serving.server import allowed_hosts
from lrkv_jax.serving.service import ServiceLimits

TOKENIZER = load_tokenizer("sotu-4096")
SPEECH = "We the people of the United States have a duty to the world and to our children"
WORDS = SPEECH.split()


@pytest.fixture(scope="module")
def service():
    return served(random_run())


@pytest.fixture(scope="module")
def port(service):
    with serving(service) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def forward(run, ids):
    """Float64 logits at each position of the text; every text is padded to one length."""
    padded = [*ids, *[0] * (64 - len(ids))]
    return np.asarray(run.model(padded), np.float64)[: len(ids)]


def test_openais_client_gets_a_text_whole_or_in_pieces_with_its_log_p(client, service):
    run = service.run
    body = {"model": "tiny", "prompt": "My fellow", "max_tokens": 40, "temperature": 0}
    more = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**body, logprobs=2, extra_body=more)
    (choice,) = whole.choices
    assert choice.text == TOKENIZER.decode(choice.token_ids)
    assert choice.finish_reason == "length" and whole.usage.completion_tokens == 40

    logprobs, prompt = choice.logprobs, run.ids("My fellow")
    logits_TV = forward(run, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    assert choice.token_ids == logits_TV.argmax(-1).tolist()
    log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    expected = log_p_TV[np.arange(40), choice.token_ids]
    np.testing.assert_allclose(logprobs.token_logprobs, expected, atol=1e-5)
    assert all(len(tops) == 2 for tops in logprobs.top_logprobs)
    for token, start in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith(("token_id:", "bytes:")) or choice.text[start:].startswith(token)

    how = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.completions.create(**body, **how, extra_body=more))
    assert "".join(event.choices[0].text for event in events[:-1]) == choice.text
    assert len(events) > 3 and events[-1].usage == whole.usage
    assert sum((event.choices[0].token_ids for event in events[:-1]), []) == choice.token_ids
    stop = choice.text[20:24]
    cut = client.completions.create(**body, stop=[stop, "\u0000"])
    assert cut.choices[0].text == choice.text[: choice.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == stop
    assert cut.usage.completion_tokens < 40
    # The first byte of a character, which the end completes.
    first = {"max_tokens": 1, "logit_bias": {str(TOKENIZER.encode("日")[0]): 100}}
    (cut,) = client.completions.create(**body | first, stop="\ufffd").choices
    assert (cut.text, cut.finish_reason, cut.stop_reason) == ("", "stop", "\ufffd")

    seeded = client.completions.create(model="tiny", prompt="We", max_tokens=9, n=3, seed=5)
    texts = [one.text for one in seeded.choices]
    assert len(set(texts)) == 3 and [one.index for one in seeded.choices] == [0, 1, 2]
    same = client.completions.create(model="tiny", prompt="We", max_tokens=9, n=2, seed=seeded.seed)
    assert [one.text for one in same.choices] == texts[:2]
    with pytest.raises(openai.BadRequestError, match="max_token: Extra inputs"):
        client.completions.create(model="tiny", prompt="a", extra_body={"max_token": 3})
    with pytest.raises(openai.NotFoundError, match="use tiny"):
        client.completions.create(model="gpt-5", prompt="a")
    assert [model.id for model in client.models.list()] == ["tiny"]
    port = client.base_url.port
    assert post(port, "/tokenize", {"prompt": "My fellow"})[1]["tokens"] == prompt
    assert 'requests_total{code="200",route="/tokenize"}' in get(port, "/metrics")[1]


def test_a_chat_is_answered_with_the_calculator():
    service = served(calling_run(), "calls")
    with (
        serving(service, "secret") as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret") as client,
    ):
        asked = {"model": "calls", "messages": [{"role": "user", "content": "How much?"}]}
        how = {"temperature": 0, "logprobs": True, "top_logprobs": 1}
        (choice,) = client.chat.completions.create(**asked, **how).choices
        assert choice.message.content == "<<4*5=20>>." and choice.finish_reason == "stop"
        tokens = [entry.token for entry in choice.logprobs.content]
        assert tokens[0].startswith("token_id:") and tokens[1:4] == ["4", "*", "5"]
        # The calculator's tokens are certain; the model's own are likely.
        log_p = [entry.logprob for entry in choice.logprobs.content]
        assert all(p == 0.0 for p in log_p[5:8]) and all(-0.1 < p <= 0 for p in log_p)
        events = list(client.chat.completions.create(**asked, temperature=0, stream=True))
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(e.choices[0].delta.content or "" for e in events) == "<<4*5=20>>."
        for more, text, why, count in (
            # A call's end is none of the text's, for which two tokens were still to come.
            ({"min_tokens": 8}, "<<4*5=20>>.!!", "stop", 12),
            ({"stop_token_ids": service.tokenizer.encode(".").tolist()}, "<<4*5=20>>", "stop", 9),
            ({"ignore_eos": True, "max_tokens": 40}, "<<4*5>>", "length", 40),
        ):
            body = {**asked, "temperature": 0, **more}
            answer = post(port, "/v1/chat/completions", body, authorization="Bearer secret")[1]
            (choice,), usage = answer["choices"], answer["usage"]
            assert choice["message"]["content"] == text and choice["finish_reason"] == why
            assert usage["completion_tokens"] == count
        for key in ("", "wrong", "sécret"):
            headers = {"authorization": f"Bearer {key}".encode()}
            status, body, _ = post(port, "/v1/completions", {}, **headers)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
        assert get(port, "/health")[0] == get(port, "/")[0] == 200
        assert get(port, "/metrics")[0] == 401


WRONG = [
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, 99999]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 1_000_000}, 413, None),
    ("/v1/completions", {"prompt": ["a"] * 33, "n": 2, "max_tokens": 1}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[1]] * 400_000, "n": 16}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a" * 1_000_000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "min_tokens": 2**31}, 400, "min_tokens"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(range(301), 1)}, 400, None),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids"),
    ("/v1/completions", {"prompt": "a", "best_of": 2}, 400, "best_of"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}] * 5000}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages"),
    ("/v1/completions", b'{"prompt": "\xff"}', 400, None),
    ("/v1/completions", b"[" * 100_000, 400, None),
    ("/v1/completions", {"prompt": "a", **{str(i): 1 for i in range(100_000)}}, 400, None),
    ("/v1/completions", {"prompt": "a", "stop": "[{" * 100_000}, 400, "stop"),
    ("/v1/nothing", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
def test_what_is_wrong_is_told_in_openais_form(path, body, status, param, port):
    got, answer, headers = post(port, path, body)
    assert got == status and answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert ("retry-after" in headers) == (status == 429)
    assert ("allow" in headers) == (status == 405)


NO_OPS = [
    dict.fromkeys(("stop", "top_k", "logit_bias", "ignore_eos", "best_of", "tools", "stream")),
    {"repetition_penalty": 1.0, "best_of": 1, "top_k": -1, "min_p": 0, "ignore_eos": False},
    {"tools": [], "tool_choice": "auto", "user": "me", "store": False, "metadata": {"a": "b"}},
    {"response_format": {"type": "text"}, "skip_special_tokens": True, "length_penalty": 1},
    {"service_tier": "auto", "request_id": "x", "use_beam_search": False, "n": 1, "bad_words": []},
]


def test_what_clients_send_without_effect_has_none(port):
    body = {"prompt": "We the people", "max_tokens": 8, "temperature": 0}
    plain, *given = (post(port, "/v1/completions", {**body, **more}) for more in ({}, *NO_OPS))
    for status, answer, _ in given:
        assert status == 200 and told(answer) == told(plain[1])
    status, answer, _ = post(port, "/v1/completions", {**body, "n": 2, "best_of": 2})
    assert status == 200 and told(answer) == 2 * told(plain[1])


def test_a_repetition_penalty_is_that_of_vllm(port, service):
    """Logits above 0 of a token that the prompt or the text has are divided, others multiplied."""
    run, penalty = service.run, 1.7
    body = {"prompt": "We the people of the people", "max_tokens": 12, "temperature": 0}
    body |= {"repetition_penalty": penalty, "return_token_ids": True, "ignore_eos": True}
    status, answer, _ = post(port, "/v1/completions", body)
    assert status == 200
    ids = run.ids(body["prompt"])
    for token in answer["choices"][0]["token_ids"]:
        logits_V = forward(run, ids)[-1]
        seen = logits_V[sorted(set(ids))]
        logits_V[sorted(set(ids))] = np.where(seen > 0, seen / penalty, seen * penalty)
        assert token == logits_V.argmax()
        ids.append(token)
    plain = post(port, "/v1/completions", {**body, "repetition_penalty": 1})[1]
    assert plain["choices"][0]["token_ids"] != answer["choices"][0]["token_ids"]


def test_one_address_shuts_no_other_out(service, monkeypatch):
    """It may have three quarters of what is open; another's text comes after its present one."""
    full, short = served(service.run), {"prompt": "We", "max_tokens": 2}
    slow(full, monkeypatch)
    with serving(full) as port:
        long = {"prompt": "We", "max_tokens": 30, "n": 16, "ignore_eos": True}
        many = [raw(port, asks(long)) for _ in range(3)]
        wait_until(lambda: full.open == 48)
        elsewhere = {"x-forwarded-for": "127.0.0.2"}
        status, answer, _ = post(port, "/v1/completions", short, **elsewhere)
        assert status == 429 and "48 texts of yours are open" in answer["error"]["message"]
        with raw(port, asks(short), source="127.0.0.2") as other:
            assert other.recv(100).startswith(b"HTTP/1.1 200")
            # Of 48 texts 4 are decoded together, and the other's came among the next ones.
            assert full.open >= 32
        for one in many:
            one.close()
        wait_until(lambda: not full.open)
        # Nor does one request that is the address's first: 48 texts of 64 and no more.
        every = {"prompt": ["We"] * 3, "max_tokens": 30, "n": 16, "ignore_eos": True}
        status, answer, _ = post(port, "/v1/completions", {**every, "prompt": ["We"] * 4})
        assert status == 400 and "64 texts are more than the 48" in answer["error"]["message"]
        with raw(port, asks(every)):
            wait_until(lambda: full.open == 48)
            assert post(port, "/v1/completions", short, **elsewhere)[0] == 429
            with raw(port, asks(short), source="127.0.0.2") as other:
                assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_bodies_and_long_texts_of_one_address_delay_no_other(service, monkeypatch):
    prompt, gate = service.run.tokenizer.prompt, Event()

    def late(text):
        if text == "long":
            gate.wait(60)
        return prompt(text)

    monkeypatch.setattr(service.run.tokenizer, "prompt", late)
    other = served(service.run)
    other.limits = dataclasses.replace(other.limits, body=100, bodies=285)  # three that are begun
    begun = asks({"prompt": "a" * 77})
    with serving(other) as port:
        for bodies in ([begun[:-1]] * 4, [asks({"prompt": "long"}, "/tokenize")] * 40):
            there = [raw(port, body) for body in bodies]
            for _ in range(2):  # while they wait, and when they have left
                time.sleep(0.2)  # until that is known
                with raw(port, asks({"prompt": "We"}), source="127.0.0.2") as another:
                    another.settimeout(20)
                    assert another.recv(100).startswith(b"HTTP/1.1 200")
                for one in there:
                    one.close()
        gate.set()


def value(port, name):
    return re.search(rf"^lrkv_{name} (\S+)$", get(port, "/metrics")[1], re.MULTILINE)[1]


def test_a_host_that_is_not_this_server_is_refused(service):
    hosts = allowed_hosts("127.0.0.1", "127.0.0.1", ["models.lab"])
    with serving(served(service.run), hosts=hosts, origins=["https://a.org"]) as port:
        for host in (f"127.0.0.1:{port}", "localhost", "[::1]:80", "MODELS.lab:99"):
            assert get(port, "/live", host=host)[0] == 200
        for host in ("evil.org", f"evil.org:{port}", "", "127.0.0.1.evil.org"):
            assert get(port, "/live", host=host)[0] == 400
        headers = post(port, "/v1/completions", {}, origin="https://a.org")[2]
        assert headers["access-control-allow-origin"] == "https://a.org"
        headers = post(port, "/v1/completions", {}, origin="https://b.org")[2]
        assert "access-control-allow-origin" not in headers
    assert allowed_hosts("0.0.0.0", "0.0.0.0", ()) is None
    # No address of this machine needs a key, so that each has the check.
    assert "127.0.0.2" in allowed_hosts("127.0.0.2", "127.0.0.2", ())
    assert allowed_hosts("127.0.0.1", "localhost", ["*"]) is None
    assert "*.lab" in allowed_hosts("127.0.0.1", "localhost", ["*.lab"])
    for name in ("models*", "*lab", "*.*.lab"):
        with pytest.raises(LrkvError, match="--allowed-host .*: use a name"):
            allowed_hosts("127.0.0.1", "localhost", ["models.lab", name])


def test_idle_and_odd_connections_make_room_and_end(service, monkeypatch):
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)
    with serving(served(service.run), limits=ConnectionLimits(40, 30, head=3)) as port:
        unread = raw(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        wait_until(lambda: len(unread.recv(1 << 20, socket.MSG_PEEK)) > 1 << 16)
        idle_ones = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        idle_ones += [raw(port, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")]
        began = time.monotonic()
        for source in ("127.0.0.1", "127.0.0.2"):
            with raw(port, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n", source) as other:
                assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert time.monotonic() < began + 2  # before any is closed for its silence
        for data in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000, b"\x16\3\1\2"):
            with raw(port, data) as odd:
                assert odd.recv(100).startswith((b"HTTP/1.1 4", b""))
        assert post(port, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        for one in idle_ones:
            one.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert one.recv(100) == b""
            one.close()
        assert time.monotonic() < began + 8
        pages = sum(len(data) for data in iter(lambda: unread.recv(1 << 20), b""))
        assert pages < 1000 * len(get(port, "/")[1].encode())
        unread.close()


def test_a_client_that_goes_away_leaves_its_pages_in_whatever_phase(port, service, monkeypatch):
    slow(service, monkeypatch)  # none ends before all have come
    before = float(value(port, "aborted_total"))
    long = {"prompt": "the people " * 60, "max_tokens": 100, "n": 4, "ignore_eos": True}
    for whole in (False, True):
        # The first is decoded; the others wait for a row, in the order in which they came.
        there = []
        for opened in range(4, 21, 4):
            there.append(raw(port, asks({**long, "stream": not whole})))
            wait_until(lambda opened=opened: service.open == opened)
        there.pop().close()  # in the queue
        wait_until(lambda: service.open == 16)
        while not whole and b"data:" not in there[0].recv(4096):
            pass
        for one in there:
            one.close()
        wait_until(lambda: idle(service))
    raw(port, asks(long)).close()  # while its prompt is read, at the latest
    wait_until(lambda: idle(service))
    wait_until(lambda: float(value(port, "aborted_total")) == before + 11)


def test_a_call_that_hangs_is_told_and_no_idleness_is(port, service, monkeypatch):
    monkeypatch.setattr(service_module, "HANG_SECONDS", 0.05)
    slow(service, monkeypatch)
    engine, troubles = service.engine_loop.engine, []
    submit = engine.submit

    def watched(*arguments, **options):
        troubles.append(service.health())
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", watched)
    time.sleep(0.2)  # nothing is asked
    with raw(port, asks({"prompt": "We", "max_tokens": 100, "n": 2, "ignore_eos": True})):
        wait_until(lambda: get(port, "/health")[0] == 503)
    assert troubles == ["", ""]
    wait_until(lambda: idle(service) and get(port, "/health")[0] == 200)


def told(body):
    return [(c["text"], c["logprobs"], c["finish_reason"]) for c in body["choices"]]


def test_what_is_open_is_bounded_and_what_takes_too_long_is_ended_and_paced(
    service, port, monkeypatch
):
    monkeypatch.setattr(service, "limits", ServiceLimits(1, tokens=10**6, seconds=0.8))
    question = {"messages": [{"role": "user", "content": "How?"}], "n": 2}
    assert post(port, "/v1/chat/completions", question)[1]["error"]["param"] == "n"
    service.open += 1
    for stream in (False, True):
        status, body, headers = post(port, "/v1/completions", {"prompt": "We", "stream": stream})
        assert status == 429 and body["error"]["code"] == "overloaded"
        assert headers["retry-after"] == "1"
    service.open -= 1
    slow(service, monkeypatch)
    long = {"prompt": "We", "max_tokens": 250, "ignore_eos": True}
    status, body, _ = post(port, "/v1/completions", long)
    assert status == 504 and body["error"]["code"] == "timeout"
    # A call of 16 steps takes 0.1 s, so fewer steps make a call.
    assert 1 <= service.engine_loop.engine.scheduler.steps <= 8
    wait_until(lambda: idle(service))

    def at_once(completion, put):
        for _ in range(99):
            put(TextDelta(completion.index))

    async def read_slowly():
        made, _ = service.completions_of(CompletionRequest(prompt="We"))
        async for _ in service.deltas(made):
            await asyncio.sleep(0.05)

    monkeypatch.setattr(service.engine_loop, "add", at_once)
    with pytest.raises(TimeoutError):
        asyncio.run(read_slowly())
    assert not service.open


def test_a_run_that_was_not_trained_to_chat_is_served_for_texts():
    run = random_run()
    data = run.config.data.model_copy(update={"mixture": None})
    texts = served(dataclasses.replace(run, config=run.config.model_copy(update={"data": data})))
    with serving(texts) as port:
        asked = {"messages": [{"role": "user", "content": "?"}]}
        error = post(port, "/v1/chat/completions", asked)[1]["error"]
        assert error["code"] == "no_chat" and "was not trained to chat" in error["message"]
        assert '"chat":false' in get(port, "/v1/models")[1]


def test_a_call_that_fails_ends_its_requests_and_an_engine_that_always_fails_is_given_up():
    service = served(random_run())
    calls, failure = service.engine_loop.engine.calls, RuntimeError("planted")
    calls.start = Mock(wraps=calls.start)
    short = {"prompt": "We", "max_tokens": 9, "temperature": 0}
    with pytest.raises(LrkvError, match="3 times in a row"), serving(service) as port:
        right = post(port, "/v1/completions", short)
        calls.start.side_effect = [failure, *[DEFAULT] * 99]
        status, body, _ = post(port, "/v1/completions", short)
        assert status == 500 and "planted" in body["error"]["message"]
        again = post(port, "/v1/completions", short)
        assert again[0] == 200 and told(again[1]) == told(right[1])
        assert service.engine_loop.faults == 1

        def leave(*_):  # a server that is stopped says of what it accepted what became of it
            service.draining = True
            raise failure

        calls.start.side_effect = leave
        status, body, _ = post(port, "/v1/completions", short)
        assert status == 500 and "planted" in body["error"]["message"]
        calls.start.side_effect, service.draining = None, False
        assert post(port, "/v1/completions", short)[0] == 200
        wait_until(lambda: idle(service))
        calls.start.side_effect = failure
        assert [post(port, "/v1/completions", short)[0] for _ in range(3)] == [500, 500, 503]
    service = served(random_run())
    calls = service.engine_loop.engine.calls
    calls.start = calls.reset = Mock(side_effect=failure)
    with pytest.raises(LrkvError, match="cannot begin anew"), serving(service) as port:
        assert [post(port, "/v1/completions", short)[0] for _ in range(2)] == [500, 503]
