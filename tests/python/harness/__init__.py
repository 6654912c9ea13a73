"""What all rooms of the tests share: ranks, how they meet and fail, models, training, programs."""
