"""Layer 1: who is connected to whom: devices, hosts, links."""
