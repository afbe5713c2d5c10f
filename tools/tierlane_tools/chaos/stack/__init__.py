"""Stacks under test: one of its own, with proxies and servers, or an external one."""
