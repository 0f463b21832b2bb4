"""Layer 2: collective operations as data: tables that `verify` proves, a simulator costs and a group runs."""
