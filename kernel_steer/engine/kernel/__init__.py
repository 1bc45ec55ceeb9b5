"""SOCKHASH and sk_skb: the engine that forwards inside the kernel. See docs/decisions/0008."""

from kernel_steer.engine.kernel.engine import KernelEngine

__all__ = ["KernelEngine"]
