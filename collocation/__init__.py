"""The interfaces to schedulers: the service, its adapters and client, and the cluster simulator."""
