"""A script's service in a thread of its own (quartet.rewards.serving, promises 1 to 3), at a socket that is
its user's alone (listening.py)."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.config import ConfigError
from quartet.rewards import serving as module
from quartet.rewards.functions import RewardFunctions
from quartet.rewards.listening import MAX_PATH_BYTES, held, path_of
from quartet.rewards.prompts import Prompts
from quartet.rewards.serving import served
from quartet.rewards.tokenizer import TextTokenizer
from served_rewards import CHATS, SECONDS, Client, channel_to, group, serving

#: Serves until it is killed; "fork" leaves a child behind that holds all that it had open.
PROGRAM = textwrap.dedent(
    """
    import multiprocessing, sys, time
    from quartet.rewards.functions import RewardFunctions
    from quartet.rewards.prompts import Prompts
    from quartet.rewards.serving import served
    from quartet.rewards.tokenizer import TextTokenizer

    folder, address = sys.argv[1:]
    prompts = Prompts("train_dataset", [{"prompt": "theirs"}], TextTokenizer(folder))
    functions = RewardFunctions(lambda completions, **_: [7.0] * len(completions))
    with served(functions, prompts, None, address, print):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        print(child.pid, flush=True)
        time.sleep(60)
    """
)


def ones(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def doubled(number: int) -> int:
    return 2 * number


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


def test_promise_1_calls_are_accepted_and_health_is_told(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, ones) as (client, _):
        stub = health_pb2_grpc.HealthStub(client.channel)
        asked = health_pb2.HealthCheckRequest(service="quartet.v1.RewardService")
        assert stub.Check(asked, timeout=SECONDS).status == health_pb2.HealthCheckResponse.SERVING
        assert client.score(0, [[1]])[0].scores[0].value == 1


def test_promise_1_twice_in_a_process_and_again_at_one_address(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    functions = RewardFunctions(ones)
    for _ in range(3):
        with (
            serving(socket_address, tokenizer, functions) as (first, _),
            serving(socket_address + "2", tokenizer, functions, CHATS[:3]) as (second, _),
        ):
            assert (first.describe().train_size, second.describe().train_size) == (20, 3)
            assert first.score(0, [[1]]) == second.score(0, [[1]])
    assert sorted(os.listdir(path_of(socket_address).parent)) == ["socket.lock", "socket2.lock"]


def test_promise_1_where_a_child_of_the_last_script_still_has_its_socket(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with held(socket_address), socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path_of(socket_address)))
        left.listen()
        inherited = left.dup()
    with inherited, serving(socket_address, tokenizer, ones) as (client, _):
        assert client.describe().train_size == 20


def test_promise_1_what_stands_in_the_way_is_told(socket_address: str) -> None:
    with held(socket_address):
        path_of(socket_address).mkdir()
    with (
        pytest.raises(ConfigError, match="stands where reward functions are to listen"),
        held(socket_address),
    ):
        pass


async def test_promise_1_under_a_running_loop(socket_address: str, tokenizer: TextTokenizer) -> None:
    """As in a notebook, whose loop goes on beside it."""
    with serving(socket_address, tokenizer, ones) as (client, _):
        scored = await asyncio.wait_for(asyncio.to_thread(client.score, 0, [[1]]), SECONDS)
        assert scored[0].scores[0].value == 1


def test_promise_1_where_the_thread_had_a_loop_and_has_none(chat_model: Path, socket_address: str) -> None:
    """In a fresh process: what a script did with asyncio before is its own."""
    program = PROGRAM.partition("with served")[0] + textwrap.dedent(
        """
        import asyncio, threading
        asyncio.run(asyncio.sleep(0))
        def twice():
            for _ in range(2):
                with served(functions, prompts, None, address, print):
                    print("served", flush=True)
        twice()
        thread = threading.Thread(target=twice)
        thread.start()
        thread.join()
        """
    )
    command = [sys.executable, "-c", program, str(chat_model), socket_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "served\n" * 4), done.stderr[-2000:]


def test_promise_1_what_is_in_the_way_is_raised_here(
    socket_address: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise ConfigError("it cannot be bound")

    monkeypatch.setattr(module, "start", refuse)
    with pytest.raises(ConfigError, match=r"^it cannot be bound$"), serving(socket_address, tokenizer, ones):
        pytest.fail("it serves")
    monkeypatch.undo()
    with serving(socket_address, tokenizer, ones) as (client, _):
        assert client.describe().train_size == 20


def test_promise_2_a_function_that_never_ends_is_left_to_itself(
    socket_address: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    began, release = threading.Event(), threading.Event()

    def stuck(**_: Any) -> list[float]:
        began.set()
        release.wait(SECONDS)
        return [0.0]

    with serving(socket_address, tokenizer, stuck) as (client, _):
        call = client.stub.ScoreGroup.future(group(0, [[1]]), timeout=SECONDS)
        assert began.wait(SECONDS)
        ending = time.monotonic()
    assert time.monotonic() - ending < module.CLOSE_SECONDS
    assert call.exception(SECONDS) is not None
    assert module.THREAD not in {thread.name for thread in threading.enumerate()}
    release.set()


def test_promise_2_what_the_script_raises_inside_ends_it(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with pytest.raises(KeyboardInterrupt), serving(socket_address, tokenizer, ones):
        raise KeyboardInterrupt
    with held(socket_address):
        pass


def test_promise_3_nothing_is_printed(
    socket_address: str, tokenizer: TextTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    import structlog

    with serving(socket_address, tokenizer, ones) as (client, _):
        client.refusal(99, [[1]])
    assert "".join(capfd.readouterr()) == ""
    structlog.get_logger().info("the script's own")
    assert "the script's own" in "".join(capfd.readouterr())


def test_promise_3_but_what_crashed_is_in_plain_text(
    socket_address: str,
    tokenizer: TextTokenizer,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not with all that its frames hold, which may be megabytes."""

    async def crashes(*_: Any) -> None:
        held_by_the_frame = "many megabytes"
        raise OSError(len(held_by_the_frame))

    monkeypatch.setattr(RewardFunctions, "score", crashes)
    with serving(socket_address, tokenizer, ones) as (client, _):
        assert client.refusal(0, [[1]]).reason == "INTERNAL"
    # pytest's own handler takes it where nothing is configured.
    told = "".join(capfd.readouterr()) + caplog.text
    assert "rpc crashed" in told and "OSError: 14" in told and "'many megabytes'" not in told


def test_a_function_may_fork(socket_address: str, tokenizer: TextTokenizer) -> None:
    def pooled(completions: list[Any], **_: Any) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(doubled, range(len(completions)))

    with serving(socket_address, tokenizer, pooled) as (client, _):
        for _ in range(3):
            assert [one.scores[0].value for one in client.score(0, [[1]] * 3)] == [0, 2, 4]


def test_listening_1_the_folder_is_made_for_its_user_alone(socket_address: str) -> None:
    address = socket_address.replace("/socket", "/deep/er/socket")
    with held(address):
        folder = path_of(address).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="is not this user's alone; make it so"), held(address):
        pytest.fail("it is held")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:50060", "is refused: a script serves at unix:/FOLDER/NAME"),
        ("unix:socket", "is refused: a script serves at unix:/FOLDER/NAME"),
        ("unix:/tmp/" + "é" * 60, "is a path of 125 bytes"),
        ("unix:/tmp/" + "x" * 103, "is a path of 108 bytes, and a socket's has 107 at most; set TMPDIR"),
        ("unix:/proc/none/socket", "for the socket of reward functions: "),
    ],
)
def test_addresses_that_are_none(address: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught, held(address):
        pytest.fail("it is held")
    assert says in str(caught.value)


def test_the_longest_path_is_served(tokenizer: TextTokenizer, socket_address: str) -> None:
    address = socket_address + "x" * (MAX_PATH_BYTES - len(path_of(socket_address).as_posix()))
    with serving(address, tokenizer, ones) as (client, _):
        assert client.describe().train_size == 20


def test_listening_2_one_that_lives_is_not_replaced_and_one_that_was_killed_is(
    chat_model: Path, socket_address: str, tokenizer: TextTokenizer
) -> None:
    """Though a child of it lives on, which has its sockets."""
    command = [sys.executable, "-c", PROGRAM, str(chat_model), socket_address]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    child = int(other.stdout.readline())
    try:
        with channel_to(socket_address) as channel:
            assert Client(channel).score(0, [[1]])[0].scores[0].value == 7
            with (
                pytest.raises(ConfigError, match="this run is trained already"),
                serving(socket_address, tokenizer, ones),
            ):
                pytest.fail("it serves")
            assert Client(channel).describe().train_size == 1
        other.kill()
        other.wait()
        assert path_of(socket_address).exists()
        with serving(socket_address, tokenizer, ones) as (client, _):
            assert client.describe().train_size == 20
    finally:
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.communicate()


def test_listening_2_a_lock_that_was_removed_is_nobodys(
    socket_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where whoever held it removes the folder between two lines of this."""
    file = path_of(socket_address).with_name("socket.lock")
    lock = fcntl.lockf

    def late(*given: Any) -> None:
        lock(*given)
        file.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", late)
        with pytest.raises(ConfigError, match="this run is trained already"), held(socket_address):
            raise AssertionError("it is not held")
    with held(socket_address):
        assert file.exists()
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"socket\.lock, for the socket of reward functions"):
        held(socket_address).__enter__()


def test_listening_2_nor_one_of_this_process(socket_address: str, tokenizer: TextTokenizer) -> None:
    prompts = Prompts("train_dataset", CHATS, tokenizer)
    with serving(socket_address, tokenizer, ones) as (client, _):
        with (
            pytest.raises(ConfigError, match="this run is trained already"),
            served(RewardFunctions(ones), prompts, None, socket_address, print),
        ):
            pytest.fail("it serves")
        assert client.describe().train_size == 20


def test_nothing_here_imports_what_trains() -> None:
    modules = ("functions", "prompts", "serving", "service", "tokenizer", "reward_model")
    program = (
        f"import sys; {'; '.join(f'import quartet.rewards.{name}' for name in modules)}\n"
        "heavy = ('torch', 'transformers', 'datasets', 'trl', 'tokenizers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_what_only_looks_imports_no_grpc() -> None:
    program = (
        "import sys, quartet.rewards.functions, quartet.rewards.prompts, quartet.rewards.tokenizer\n"
        "print('grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
