# SPDX-License-Identifier: Apache-2.0
"""What happens on links, told to the ledgers: the same for every engine that works over them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrail.transfer.errors import LinkLost
from kvrail.transfer.link_events import (
    LinkDown,
    LinkEvent,
    LinkUp,
    PeerBeat,
    Proven,
    Received,
    Recovered,
    Suspect,
    WriterEvent,
)
from kvrail.transfer.receiver import Receiver
from kvrail.transfer.sender import Sender
from kvrail.transfer.tickets import SenderEffect

__all__ = ["carry_out", "tell_receiver", "tell_sender"]

_log = logging.getLogger(__name__)


def tell_receiver(receiver: Receiver, now: float, event: LinkEvent) -> None:
    """An event of a link, for a completion engine's ledger; it ignores what does not concern it."""
    match event:
        case LinkUp(key, epoch, lane):
            receiver.link_up(now, key, epoch, lane.fence)
        case LinkDown(key, epoch, reason):
            receiver.link_down(now, key, epoch, reason)
        case Proven(key, epoch, how):
            receiver.proven(now, key, epoch, how)
        case Suspect(key):
            receiver.link_suspect(now, key)
        case Recovered(key):
            receiver.link_recovered(key)
        case Received(key, message):
            receiver.on_message(now, key, message)
        case PeerBeat(key, beat):
            receiver.on_beat(now, key, beat)
        case _:
            pass


def tell_sender(sender: Sender, now: float, event: LinkEvent) -> None:
    """An event of a link, for a prefill engine's ledger; it ignores what does not concern it."""
    match event:
        case LinkUp(key, epoch):
            sender.link_up(now, key, epoch)
        case LinkDown(key, epoch, reason):
            sender.link_down(now, key, epoch, reason)
        case Proven(key, epoch):
            sender.proven(key, epoch)
        case Received(key, message):
            sender.on_message(now, key, message)
        case PeerBeat(key, beat):
            sender.on_beat(now, key, beat)
        case WriterEvent(kind="progress", writer=writer):
            sender.on_progress(now, writer)
        case WriterEvent(kind="rung", writer=writer):
            sender.on_rung(now, writer)
        case WriterEvent(kind="quiet", writer=writer, ok=ok, reason=reason):
            sender.on_quiet(now, writer, ok, reason)
        case WriterEvent(kind="failed", writer=writer, reason=reason):
            sender.on_failed(now, writer, reason)
        case _:
            pass


def carry_out(sender: Sender, do: Callable[[SenderEffect], None]) -> None:
    """Do what the ledger wants, in order, until it wants nothing more."""
    while effects := sender.take_effects():
        for effect in effects:
            try:
                do(effect)
            except LinkLost as error:
                # Its LinkDown is on the way and ends every ticket of the link.
                _log.debug("not done, the link is gone: %s", error)
