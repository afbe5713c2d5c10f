"""Limits in a gateway: tier capacity, demand, customer limits and rejections."""
