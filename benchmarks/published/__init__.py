"""Published training runs: tables of others' measurements as jobs that run the libraries' own code."""
