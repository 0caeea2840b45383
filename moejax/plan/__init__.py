"""What a run costs before it runs: parameters, FLOPs, memory, traffic, and the time that a roofline gives them."""
