"""The agent: sends the Parquet files of an on-prem folder as ticks, over bad networks, each exactly once.

Importable: `Agent` with an `AgentStore`, a `Pager` and an `IngestClient` does what `lockstep agent` does.
"""

from lockstep.ticks.agent.client import IngestClient, TickFinalizeError
from lockstep.ticks.agent.pages import Pager
from lockstep.ticks.agent.sender import Agent
from lockstep.ticks.agent.state import AgentStore, AgentTick, LocalState

__all__ = ["Agent", "AgentStore", "AgentTick", "IngestClient", "LocalState", "Pager", "TickFinalizeError"]
