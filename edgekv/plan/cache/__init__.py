"""The cost of a KV cache: bytes held and copied by each update strategy, graph inputs and outputs."""

from edgekv.plan.cache.choices import CHOICES, Choice, choices_for
from edgekv.plan.cache.ports import GraphPorts, graph_ports
from edgekv.plan.cache.recommend import Recommendation, recommend
from edgekv.plan.cache.strategy_cost import StrategyCost, strategy_cost
from edgekv.plan.cache.textbook import estimate
from edgekv.plan.cache.traffic import Traffic, count_addresses, count_traffic

__all__ = [
    "CHOICES",
    "Choice",
    "GraphPorts",
    "Recommendation",
    "StrategyCost",
    "Traffic",
    "choices_for",
    "count_addresses",
    "count_traffic",
    "estimate",
    "graph_ports",
    "recommend",
    "strategy_cost",
]
