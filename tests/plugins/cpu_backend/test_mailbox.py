"""What waits at a mailbox, without a connection: ends of peers, and the end of the rank itself."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from plugins.cpu_backend import mailbox
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.ranks import LONG, until, waits


def test_a_close_waits_for_what_has_not_left_on_a_slow_machine(monkeypatch):
    monkeypatch.setattr(mailbox, "PATIENCE", 0.0)
    mail = mailbox.Mailbox(0, LONG, lambda text: None)
    mail.buffered[1] = 1
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(mail.close)
        until(lambda: waits(mail) or closing.done())
        assert not closing.done()
        mail.sent(1, None)
        closing.result(LONG)


def test_what_a_peer_sent_before_it_closed_arrives_although_sending_to_it_has_failed():
    mail = mailbox.Mailbox(0, LONG, lambda text: None)
    mail.unreach(1, BrokenPipeError(32, "Broken pipe"))  # the sender was first to see that the peer has closed
    call = mailbox.Call("here", 7, False, {1: 0}, unsent=set(), missing={1})
    frame = mailbox.pack(7, 0, np.arange(3.0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mail.wait, call)
        until(lambda: waits(mail))
        mail.put(1, frame)
        mail.lose(1, ConnectionResetError())
        waiting.result(LONG)
    assert call.arrived == {1: frame}
    with pytest.raises(ClusterError, match=r"^there: rank 1 closed its connection$"):
        mail.wait(mailbox.Call("there", 7, False, {1: 1}, unsent={1}, missing={1}))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (mailbox.Disconnected("closed its connection"), "closed its connection"),
        (ConnectionResetError(104, "reset"), "closed its connection"),  # with bytes that it has not read
        (TimeoutError(110, "timed out"), r"is out of reach: \[Errno 110\] timed out"),
    ],
)
def test_an_end_and_a_reset_say_the_same(error, told):
    mail = mailbox.Mailbox(0, LONG, lambda text: None)
    mail.lose(1, error)
    with pytest.raises(ClusterError, match=f"^here: rank 1 {told}$"):
        mail.wait(mailbox.Call("here", 7, False, {1: 0}, unsent=set(), missing={1}))
