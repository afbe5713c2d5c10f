"""What whoever calls Redis reports of its calls, and who listens: the breaker, or nobody."""

from typing import Protocol


class CallWatch(Protocol):
    """Who is told how calls on Redis go, and says whether one that failed is worth sending again."""

    def begun(self) -> None: ...

    def answered(self) -> None: ...

    def failed(self) -> None: ...

    def try_again(self, tries: int) -> bool: ...


class OnceMore:
    """Nobody listens; a call is tried twice."""

    def begun(self) -> None:
        """Not noted."""

    def answered(self) -> None:
        """Not noted."""

    def failed(self) -> None:
        """Not noted."""

    def try_again(self, tries: int) -> bool:
        """Once."""
        return tries < 2


ONCE_MORE = OnceMore()
