# Sources compiled once per instruction set, with their flags.
