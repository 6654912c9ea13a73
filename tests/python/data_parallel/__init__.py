"""DataParallel and the functions of torch.nn.parallel are tested here."""
