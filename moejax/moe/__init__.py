"""Mixture of experts: router, balance, exchange of rows, experts, statistics.

The layer reads: route, plan, dispatch, experts, combine. Letters: T local tokens, K choices, E experts,
e local experts, R rows of the expert buffer, D model width, F expert width.
"""
