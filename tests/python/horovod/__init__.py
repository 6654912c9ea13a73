"""trireme.horovod is tested here."""
