"""Who sends what to whom: a plan's keys and inputs as a load that is ready to begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from tierlane.bench.closed_load import ClosedLoad
from tierlane.bench.http_client import RequestForm
from tierlane.bench.inputs import Inputs
from tierlane.bench.load import Load, Phase
from tierlane.bench.open_load import OpenLoad
from tierlane.bench.output_check import OutputCheck
from tierlane.bench.plan import Address, Mode, Plan, UsageError
from tierlane.bench.schedule import schedule


class Common(TypedDict):
    """What every load is made from."""

    phases: Sequence[Phase]
    forms: Sequence[Sequence[RequestForm]]
    inputs: Inputs
    check: OutputCheck


@dataclass(frozen=True)
class Traffic:
    """What is sent, and what is looked for in the answers. `keys`: by tier, in the order of the mix."""

    plan: Plan
    keys: Sequence[Sequence[str]]
    inputs: Inputs
    check: OutputCheck

    def load(self, address: Address, phases: Sequence[Phase]) -> Load:
        """A load up to the end of the last phase. Raises UsageError for a key that cannot be used."""
        plan = self.plan
        load = self._unconnected(self._forms(address), phases)
        load.connect(address.host, address.port, connections=plan.connections, timeout_s=plan.timeout)
        return load

    def _unconnected(self, forms: Sequence[Sequence[RequestForm]], phases: Sequence[Phase]) -> Load:
        plan = self.plan
        common: Common = {"phases": phases, "forms": forms, "inputs": self.inputs, "check": self.check}
        if plan.mode is Mode.CLOSED:
            return ClosedLoad(plan.connections, plan.mix, plan.seed, **common)
        return OpenLoad(schedule(plan.arrivals, plan.rate, phases[-1].until_s, plan.mix, plan.seed), **common)

    def _forms(self, address: Address) -> list[list[RequestForm]]:
        try:
            return [
                [RequestForm(address.authority, address.path, key, self.inputs, self.plan.model) for key in of_tier]
                for of_tier in self.keys
            ]
        except ValueError as error:
            raise UsageError(f"A key cannot be used: {error}") from None
