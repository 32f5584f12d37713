"""One policy over several trainer processes; docs/parallel.md. `apply` is the one place that fixes the order."""
