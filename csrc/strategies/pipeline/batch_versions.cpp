#include <trireme/strategies/pipeline/batch_versions.h>

#include <torch/csrc/autograd/variable.h>

namespace trireme {

at::Tensor BatchVersions::apart(const at::Tensor& piece, int64_t micro_batch) {
  const bool has_version = piece.defined() && !piece.is_inference() && piece.has_storage() &&
                           !piece.unsafeGetTensorImpl()->is_python_dispatch();
  if (!has_version) return piece;
  at::Tensor own = piece.variable_data();
  const auto [known, is_first] =
      versions_.try_emplace({piece.storage().unsafeGetStorageImpl(), micro_batch},
                            own.unsafeGetTensorImpl()->version_counter());
  if (!is_first) own.unsafeGetTensorImpl()->set_version_counter(known->second);
  pieces_.push_back({piece, own, piece._version(), own._version()});
  return own;
}

void BatchVersions::tell_batch() {
  for (Piece& piece : pieces_) {
    if (piece.own._version() == piece.seen_own) continue;
    piece.seen_own = piece.own._version();
    torch::autograd::impl::bump_version(piece.of_batch);
  }
  for (Piece& piece : pieces_) piece.seen_of_batch = piece.of_batch._version();
}

void BatchVersions::tell_micro_batches() {
  for (Piece& piece : pieces_) {
    if (piece.of_batch._version() != piece.seen_of_batch)
      torch::autograd::impl::bump_version(piece.own);
  }
  for (Piece& piece : pieces_) {
    piece.seen_own = piece.own._version();
    piece.seen_of_batch = piece.of_batch._version();
  }
}

}  // namespace trireme
