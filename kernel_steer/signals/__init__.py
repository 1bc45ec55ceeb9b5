"""The eviction signal: "node N, in its incarnation E, goes away" or "stays after all". Signed and small.

Two carriers bring the same signal and the first to arrive wins: a datagram straight to every registered
gateway (`datagram`, `gateways`), and the Redis stream `steer:signals` as the sure one (`stream`). A
gateway that hears it twice does nothing the second time (`kernel_steer.gateway.steering`). Before both, a
node on the gateway's own host writes the flip into the kernel itself (`own_host`).
"""

from kernel_steer.signals.datagram import DatagramReceiver, DatagramSender
from kernel_steer.signals.gateways import GatewayAddress, GatewayBook, known_gateways, register, unregister
from kernel_steer.signals.message import CANCEL, MAX_AGE, Refusals, Refused, Signal, SignalRefused
from kernel_steer.signals.own_host import OwnHost
from kernel_steer.signals.report import GatewayReport, gateway_reports
from kernel_steer.signals.stream import LOOK_BACK, STREAM, STREAM_MAX_ENTRIES, SignalReader, connect, publish

__all__ = [
    "CANCEL",
    "LOOK_BACK",
    "MAX_AGE",
    "STREAM",
    "STREAM_MAX_ENTRIES",
    "DatagramReceiver",
    "DatagramSender",
    "GatewayAddress",
    "GatewayBook",
    "GatewayReport",
    "OwnHost",
    "Refusals",
    "Refused",
    "Signal",
    "SignalReader",
    "SignalRefused",
    "connect",
    "gateway_reports",
    "known_gateways",
    "publish",
    "register",
    "unregister",
]
