"""The fitness probe: what each worker of a host reaches, and which of them are slower than their peers."""
