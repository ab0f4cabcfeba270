"""The native engine's operations on a CPU, as loops in C that this machine's compiler makes."""
