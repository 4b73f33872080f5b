"""What a repro script is made of. Ordinary modules, tested as such; `detaudit.repro.excerpt` cuts out of
them, and out of the kernels they call, what one script needs."""
