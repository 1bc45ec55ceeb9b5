"""Parts that several benchmarks share. Each script of bench/ prints one JSON object."""
