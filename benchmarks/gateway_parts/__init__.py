"""What `benchmarks.gateway` puts around the proxies: a stub generator, a load generator."""
