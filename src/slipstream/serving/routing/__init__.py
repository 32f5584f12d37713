"""Which replica gets a request: what the router remembers, and the policies that decide. Pure and synchronous; the caller has the clock."""
