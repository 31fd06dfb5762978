"""What SIGTERM does before anybody could stop for it; see also test_main_integration.py."""

import signal
import threading
from collections.abc import Iterator

import pytest

from manyhands import signals


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signals, "_came", False)
    yield
    signal.signal(signal.SIGTERM, before)


def test_at_the_start_of_a_command_it_ends_it_with_75(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the exception was swallowed, the run stops at its start."""
    signals.end_by_sigterm()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 75
    assert "SIGTERM" in capsys.readouterr().err
    reasons: list[str] = []
    with signals.sigterm_to(reasons.append):
        assert reasons == ["preempted"]


def test_within_a_run_it_asks_to_stop_and_afterwards_it_is_as_before() -> None:
    signals.end_by_sigterm()
    reasons: list[str] = []
    with signals.sigterm_to(reasons.append):
        assert reasons == []
        signal.raise_signal(signal.SIGTERM)
        assert reasons == ["preempted"]
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)


def test_a_script_has_it_as_python_gives_it() -> None:
    signals.end_by_sigterm()
    signals.leave_sigterm_to_the_system()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # somebody's choice stays
    signals.leave_sigterm_to_the_system()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_what_came_while_it_was_blocked_is_noted() -> None:
    assert not signals.sigterm_came()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # a forked worker has this thread alone
    signals.note_sigterm()
    assert signals.sigterm_came()
