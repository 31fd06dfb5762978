"""Which copy of a shard is its primary: a sequence of numbered views, decided by the driver. Pure: no clock, no process.

    view 0: a primary, and a new copy that it sends its image and log ── the copy has all ──> primary and backup
    the primary is lost ──> the backup is the primary, and a new copy is started in the lost one's place
    the backup is lost ──> the primary alone, and a new copy is started
    a copy is lost while there is no other one ──> the shard is lost

Every change is a view with the next number. Copies refuse what is of an older one, and workers go where the newest says.
A copy is lost once: its process index may then be another process's, which knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EARLY_LOSSES = 3
"""A new copy that is lost so often in a row, before it was a backup, is not started again."""


@dataclass(frozen=True, kw_only=True)
class ShardView:
    """Who is what, by process index. recruit: a new copy, which the primary sends its image and log. link: the number of
    the view in which the present backup, or the recruit, was new: the connection between the two is of that view."""

    number: int
    primary: int
    backup: int | None = None
    recruit: int | None = None
    link: int = -1

    @property
    def other(self) -> int | None:
        """The copy beside the primary, if there is one."""
        return self.recruit if self.backup is None else self.backup

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class NewView:
    """Tell all copies of it; where it has a recruit, a connection is to be made between that one and the primary."""

    view: ShardView


@dataclass(frozen=True)
class StartCopy:
    """Start a process of this index in a lost one's place."""

    process_index: int


@dataclass(frozen=True)
class StopCopy:
    """Kill this process: no view has it any more."""

    process_index: int


@dataclass(frozen=True)
class CopiesChanged:
    """What users are to read: the shard has one copy, or two again. lost: the process that is not there any more."""

    copies: int
    lost: int | None = None


@dataclass(frozen=True)
class LostShard:
    """The last copy is lost: nobody has the shard's state."""

    process_index: int


Action = NewView | StartCopy | StopCopy | CopiesChanged | LostShard


class Views:
    """The views of one shard. copies: the process indices of its copies, the first primary first."""

    def __init__(self, copies: Sequence[int]) -> None:
        self._copies = list(copies)
        self._alone = len(self._copies) == 1
        self._there = set(self._copies)  # started, or about to be
        self._early_losses = 0
        self._complete = self._alone  # there was a backup: from then on workers are let in
        self.lost_for_good = False
        self._actions: list[Action] = []
        self._make(primary=self._copies[0], recruit=None if self._alone else self._copies[1])

    view: ShardView

    @property
    def serving(self) -> ShardView | None:
        """The view whose primary workers connect to; None: not yet, or never again."""
        return self.view if self._complete and not self.lost_for_good else None

    def lost(self, process_index: int) -> None:
        """This copy's process is gone, or will be: it was judged lost."""
        if process_index not in self._there or self.lost_for_good:
            return
        self._there.discard(process_index)
        view = self.view
        if process_index not in (view.primary, view.backup):  # it is new, or not even that
            self._early_losses += 1
            self._start_another(process_index)
        elif process_index == view.backup:
            self._actions.append(CopiesChanged(1, process_index))
            self._make(primary=view.primary)
            self._start_another(process_index)
        elif process_index == view.primary:
            heir = view.backup if self._complete else view.other  # before anybody was let in, nobody has any state
            if heir is None:
                self._give_up(process_index)
                return
            if self._complete:
                self._actions.append(CopiesChanged(1, process_index))
            self._early_losses += not self._complete
            self._make(primary=heir)
            self._start_another(process_index)

    def started(self, process_index: int) -> None:
        """The process of a new copy is there: the primary is to send it its image."""
        if process_index in self._there and process_index not in (
            self.view.primary,
            self.view.backup,
            self.view.recruit,
        ):
            self._make(primary=self.view.primary, backup=self.view.backup, recruit=process_index)

    def copied(self, link: int) -> None:
        """The primary says that the new copy at the other end of this link has all that was ever answered."""
        recruit = self.view.recruit
        if link != self.view.link or recruit is None or self.lost_for_good:
            return
        if self._complete:
            self._actions.append(CopiesChanged(2))
        self._complete, self._early_losses = True, 0
        self._make(primary=self.view.primary, backup=recruit)

    def backup_lost(self, link: int) -> None:
        """This link is broken: the primary has no backup, or new copy, any more. That one is ended.

        A link, not a view: the view in which the primary noticed may be over, and the new copy the backup by now.
        """
        other = self.view.other
        if link == self.view.link and other is not None and other in self._there and not self.lost_for_good:
            self._actions.append(StopCopy(other))
            self.lost(other)

    def decide(self) -> list[Action]:
        """What is to be done, in this order; each action once."""
        actions, self._actions = self._actions, []
        return actions

    def _make(self, primary: int, backup: int | None = None, recruit: int | None = None) -> None:
        number = self.view.number + 1 if hasattr(self, "view") else 0
        link = number if recruit is not None else self.view.link if backup is not None else -1
        self.view = ShardView(number=number, primary=primary, backup=backup, recruit=recruit, link=link)
        self._actions.append(NewView(self.view))

    def _start_another(self, process_index: int) -> None:
        """In a lost one's place. The view without it comes first: the primary does not wait for it any longer."""
        if self.view.recruit == process_index:
            self._make(primary=self.view.primary, backup=self.view.backup)
        if self._early_losses < EARLY_LOSSES:
            self._there.add(process_index)
            self._actions.append(StartCopy(process_index))
        elif not self._complete:
            self._give_up(process_index)

    def _give_up(self, process_index: int) -> None:
        self.lost_for_good = True
        self._actions.append(LostShard(process_index))
