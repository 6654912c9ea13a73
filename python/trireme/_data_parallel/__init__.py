"""DataParallel and the functions of torch.nn.parallel are made here: replicas in one process."""
