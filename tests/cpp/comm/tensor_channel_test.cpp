// Messages of tensors from rank to rank, through the memory of a host and over Gloo.

#include <trireme/comm/tensor_channel.h>

#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/communicator.h>
#include <trireme/comm/launch/make_communicator.h>
#include <trireme/comm/make_channels.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <catch_torch.h>
#include <latch>
#include <random>
#include <thread>
#include <thread_ranks.h>
#include <vector>

namespace trireme::tensor_channel_test {

using trireme::test::Engine;
using trireme::test::error_of;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);
const std::vector<Engine> kEngines{Engine::kShm, Engine::kGloo};
using Tensors = std::vector<at::Tensor>;

at::Tensor filled(at::IntArrayRef sizes, at::ScalarType dtype, int64_t seed) {
  at::Tensor bytes = at::arange(at::empty(sizes, dtype).nbytes(), at::kLong).mul(7).add(seed);
  // Some bytes of a float8 and of halves are NaNs, which compare as bytes.
  return bytes.remainder(dtype == at::kBool ? 2 : 251).to(at::kByte).view(dtype).view(sizes);
}

bool has_same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
  };
  return a.numel() == 0 || at::equal(bytes(a), bytes(b));
}

// Runs ranks with channels, and lets none go before all have done their part.
void run_channels(int64_t world, const std::vector<ChannelRequest>& requests, Engine engine,
                  const std::function<void(ThreadRank&, TensorChannels&)>& rank_main) {
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        const auto channels = make_channels(*rank.communicator, requests);
        rank_main(rank, *channels);
        if (!rank.communicator->failure()) rank.communicator->barrier("the end").wait();
      },
      kTimeout, engine);
}

// Receives and is done with it.
TensorMessage take_message(TensorChannels& channels, size_t index, int64_t micro_batch,
                           int64_t step = 1) {
  TensorMessage message = channels.receiver(index)->receive(step, micro_batch, "a take");
  channels.receiver(index)->done_with_one();
  return message;
}

TensorMessage numbered(int64_t number, Tensors tensors = {}) {
  return {.step = 1, .micro_batch = number, .tensors = std::move(tensors)};
}

}  // namespace

TEST_CASE("a message is what was sent, whatever its tensors") {
  Tensors sent{at::Tensor(),
               at::empty({0, 4}, at::kDouble),
               filled({}, at::kLong, 3),
               filled({4, 6}, at::kFloat, 5).t(),
               filled({4, 6}, at::kHalf, 5).slice(1, 0, 6, 2),
               filled({2, 3, 4, 5}, at::kFloat, 1).contiguous(at::MemoryFormat::ChannelsLast),
               filled({3}, at::kComplexDouble, 9).conj(),
               at::imag(filled({5}, at::kComplexFloat, 9).conj()),
               filled({1, 3}, at::kFloat, 2).expand({4, 3}),
               filled({7}, at::kFloat, 6).requires_grad_(),
               at::_efficientzerotensor({3}, at::kFloat),
               filled({300'000}, at::kInt, 1),
               filled({2'300'000}, at::kInt, 2)};
  for (const at::ScalarType dtype :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32, at::kUInt64})
    sent.push_back(filled({3, 5}, dtype, 11));
  for (const Engine engine : kEngines) {
    std::string text;
    Tensors came;
    std::vector<bool> requires_grad;
    bool is_empty = false;
    run_channels(2, {{0, 1, 2, "there"}}, engine, [&](ThreadRank& rank, TensorChannels& channels) {
      if (rank.where.rank == 0) {
        TensorMessage message = numbered(0, sent);
        message.text = std::string(5000, 'x') + '\0' + "end";
        channels.sender(0)->send(message, "0F0");
        channels.sender(0)->send(numbered(1), "0F1");
      } else {
        const TensorMessage message = channels.receiver(0)->receive(1, 0, "1F0");
        text = message.text;
        requires_grad = message.requires_grad;
        for (const at::Tensor& tensor : message.tensors) came.push_back(tensor);
        const TensorMessage second = channels.receiver(0)->receive(1, 1, "1F1");
        is_empty = second.tensors.empty() && second.text.empty();
      }
    });
    CHECK(text == std::string(5000, 'x') + '\0' + "end");
    CHECK(is_empty);
    REQUIRE(came.size() == sent.size());
    for (size_t i = 0; i < sent.size(); ++i) {
      INFO("tensor " << i);
      CHECK(has_same_bytes(came[i], sent[i]));
      CHECK(requires_grad[i] == (i == 9));
      if (!came[i].defined() || came[i].numel() == 0) continue;
      CHECK_FALSE(came[i].requires_grad());
      CHECK(reinterpret_cast<uintptr_t>(came[i].const_data_ptr()) % 64 == 0);
      CHECK(came[i].storage().nbytes() == came[i].nbytes());
      if (sent[i].is_non_overlapping_and_dense()) {
        CHECK(came[i].strides() == sent[i].strides());
      } else {
        CHECK(came[i].is_contiguous());
      }
    }
  }
}

TEST_CASE("tensors that no message can hold are refused by name, and the channel goes on") {
  const Tensors refused{at::eye(3).to_sparse(),
                        at::quantize_per_tensor(at::ones({3}), 1, 0, at::kQInt8),
                        at::empty({3}, at::kMeta), at::eye(3).to_mkldnn()};
  for (const Engine engine : kEngines) {
    std::vector<std::string> said;
    bool fine = false;
    run_channels(2, {{0, 1, 1, "there"}}, engine, [&](ThreadRank& rank, TensorChannels& channels) {
      if (rank.where.rank == 1) {
        fine = channels.receiver(0)->receive(1, 7, "1F7").tensors.size() == 1;
        return;
      }
      for (const at::Tensor& tensor : refused) {
        try {
          channels.sender(0)->send(numbered(0, {at::ones({2}), tensor}), "0F0");
        } catch (const c10::TypeError& error) {
          said.push_back(error.what_without_backtrace());
        }
      }
      channels.sender(0)->send(numbered(7, {at::ones({2})}), "0F7");
    });
    CHECK(fine);
    REQUIRE(said.size() == refused.size());
    CHECK_THAT(said[0], Catch::Contains("send of 0F0 by channel 'there' to rank 1 got tensor 1, "
                                        "which has the layout Sparse (rank 0 of 2)"));
    CHECK_THAT(said[1], Catch::Contains("is quantized (QInt8)"));
    CHECK_THAT(said[2], Catch::Contains("has no values"));
    CHECK_THAT(said[3], Catch::Contains("has the layout Mkldnn"));
  }
}

TEST_CASE("messages of random sizes cross in all directions") {
  std::vector<ChannelRequest> requests;
  for (const int64_t from : {0, 1, 2})
    for (const int64_t to : {0, 1, 2})
      if (from != to)
        requests.push_back({from, to, 1 + (from + to) % 3, std::to_string(from * 10 + to)});
  for (const Engine engine : kEngines) {
    std::vector<int64_t> wrong(3);
    run_channels(3, requests, engine, [&](ThreadRank& rank, TensorChannels& channels) {
      constexpr int64_t kMessages = 120;
      const auto message_of = [](size_t channel, int64_t number) {
        std::mt19937 random(static_cast<unsigned>(channel * 1000 + static_cast<size_t>(number)));
        TensorMessage message = numbered(number);
        message.text = std::string(random() % 100, 'a');
        for (size_t i = random() % 4; i > 0; --i) {
          const auto size = static_cast<int64_t>(random() % (number % 10 == 0 ? 70'000 : 300));
          message.tensors.push_back(at::full({size}, double(number)));
        }
        return message;
      };
      std::vector<Tensors> kept;
      for (int64_t number = 0; number < kMessages; ++number) {
        for (size_t i = 0; i < requests.size(); ++i)
          if (channels.sender(i)) channels.sender(i)->send(message_of(i, number), "F");
        for (size_t i = 0; i < requests.size(); ++i) {
          if (!channels.receiver(i)) continue;
          const TensorMessage came = take_message(channels, i, number);
          const TensorMessage expected = message_of(i, number);
          bool fine = came.text == expected.text && came.tensors.size() == expected.tensors.size();
          for (size_t t = 0; fine && t < came.tensors.size(); ++t)
            fine = at::equal(came.tensors[t], expected.tensors[t]);
          wrong[static_cast<size_t>(rank.where.rank)] += !fine;
          kept.push_back(came.tensors);  // some stay for a while
          if (kept.size() > 7) kept.erase(kept.begin() + number % 7);
        }
      }
    });
    CHECK(wrong == std::vector<int64_t>(3));
  }
}

TEST_CASE("a channel is drained once all its messages were received") {
  for (const Engine engine : kEngines) {
    std::latch is_sent(2);
    std::vector<bool> said;
    run_channels(2, {{0, 1, 2, "there"}}, engine, [&](ThreadRank& rank, TensorChannels& channels) {
      if (rank.where.rank == 0) {
        TensorSender& sender = *channels.sender(0);
        said.push_back(sender.is_drained());
        sender.send(numbered(0), "0F0");
        sender.send(numbered(1), "0F1");
        said.push_back(sender.is_drained());
        is_sent.arrive_and_wait();
        const auto deadline = std::chrono::steady_clock::now() + kTimeout;
        while (!sender.is_drained() && std::chrono::steady_clock::now() < deadline)
          std::this_thread::yield();
        said.push_back(sender.is_drained());
      } else {
        is_sent.arrive_and_wait();
        for (int64_t number = 0; number < 2; ++number) take_message(channels, 0, number);
      }
    });
    CHECK(said == std::vector<bool>{true, false, true});
  }
}

TEST_CASE("who keeps all that it receives holds up nobody, and memory comes back") {
  constexpr int64_t kMessages = 40;
  bool fine = true;
  size_t places = 0;
  run_channels(2, {{0, 1, 2, "there"}}, Engine::kShm,
               [&](ThreadRank& rank, TensorChannels& channels) {
                 if (rank.where.rank == 0) {
                   for (int64_t i = 0; i < 3 * kMessages; ++i)
                     channels.sender(0)->send(numbered(i, {at::full({1000}, double(i))}), "0F");
                   return;
                 }
                 Tensors kept;
                 for (int64_t i = 0; i < kMessages; ++i)
                   kept.push_back(take_message(channels, 0, i).tensors[0]);
                 for (int64_t i = 0; i < kMessages; ++i)
                   fine &= at::equal(kept[static_cast<size_t>(i)], at::full({1000}, double(i)));
                 std::thread([&] { kept.clear(); }).join();
                 std::vector<const void*> seen;
                 for (int64_t i = kMessages; i < 3 * kMessages; ++i) {
                   at::Tensor tensor = take_message(channels, 0, i).tensors[0];
                   fine &= at::equal(tensor, at::full({1000}, double(i)));
                   if (i >= 2 * kMessages &&
                       std::find(seen.begin(), seen.end(), tensor.const_data_ptr()) == seen.end())
                     seen.push_back(tensor.const_data_ptr());
                   tensor.add_(1);  // it is this rank's to write
                 }
                 places = seen.size();
               });
  CHECK(fine);
  CHECK(places <= 4);
}

TEST_CASE("what was received outlives the group") {
  at::Tensor kept;
  run_channels(2, {{0, 1, 1, "there"}}, Engine::kShm,
               [&](ThreadRank& rank, TensorChannels& channels) {
                 if (rank.where.rank == 0) {
                   channels.sender(0)->send(numbered(0, {at::arange(1000)}), "0F0");
                 } else {
                   kept = channels.receiver(0)->receive(1, 0, "1F0").tensors[0];
                 }
               });
  CHECK(at::equal(kept, at::arange(1000)));
}

TEST_CASE("another micro-batch than expected is an error that names both") {
  for (const Engine engine : kEngines) {
    std::string said;
    run_channels(2, {{0, 1, 2, "stage 0 to stage 1"}}, engine,
                 [&](ThreadRank& rank, TensorChannels& channels) {
                   if (rank.where.rank == 0) {
                     channels.sender(0)->send(numbered(4), "0F4");
                   } else {
                     said = error_of([&] { channels.receiver(0)->receive(1, 3, "1F3"); });
                   }
                 });
    CHECK_THAT(said, Catch::Contains("receive of 1F3 by channel 'stage 0 to stage 1' from rank 0 "
                                     "expects micro-batch 3 of step 1, got micro-batch 4 of step 1 "
                                     "(rank 1 of 2)"));
  }
}

TEST_CASE("a failed rank ends all waits, and after it the channels work again") {
  std::vector<std::string> said(3);
  std::vector<double> came;
  run_channels(
      3, {{0, 1, 2, "a"}, {1, 2, 2, "b"}}, Engine::kShm,
      [&](ThreadRank& rank, TensorChannels& channels) {
        Communicator& ranks = *rank.communicator;
        const auto send = [&](size_t channel, int64_t step, int64_t number) {
          channels.sender(channel)->send(
              {.step = step, .micro_batch = number, .tensors = {at::full({9}, double(step))}}, "F");
        };
        for (int64_t step = 0; step < 6; step += 2) {
          if (rank.where.rank == 0) {
            said[0] = error_of([&] {
              for (int64_t i = 0; i < 9; ++i) send(0, step, i);  // until it is full
            });
          } else if (rank.where.rank == 1) {
            const TensorMessage kept = channels.receiver(0)->receive(step, 0, "1F0");
            send(1, step, 0);
            ranks.announce_failure("rank 1 spilled the coffee");
            said[1] = error_of([&] { send(1, step, 1); });
          } else {
            said[2] = error_of([&] {
              for (int64_t i = 0;; ++i) channels.receiver(1)->receive(step, i, "2F");
            });
          }
          ranks.recover();
          channels.forget_before(step + 1);
          if (rank.where.rank == 0)
            for (int64_t i = 0; i < 4; ++i) send(0, step + 1, i);
          for (int64_t i = 0; i < 4 && rank.where.rank == 1; ++i)
            channels.sender(1)->send(take_message(channels, 0, i, step + 1), "1F");
          for (int64_t i = 0; i < 4 && rank.where.rank == 2; ++i)
            came.push_back(take_message(channels, 1, i, step + 1).tensors[0][8].item<double>());
        }
      });
  for (const std::string& text : said) CHECK_THAT(text, Catch::Contains("spilled the coffee"));
  CHECK_THAT(said[0], Catch::Contains("send of F by channel 'a' to rank 1, which is not done"));
  CHECK_THAT(said[2], Catch::Contains("receive of 2F by channel 'b' from rank 1"));
  CHECK(came == std::vector<double>{1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5});
}

TEST_CASE("over Gloo a failed rank ends all waits") {
  std::string said;
  run_channels(2, {{0, 1, 2, "a"}}, Engine::kGloo, [&](ThreadRank& rank, TensorChannels& channels) {
    if (rank.where.rank == 0) return rank.communicator->announce_failure("the milk is sour");
    said = error_of([&] { channels.receiver(0)->receive(1, 0, "1F0"); });
    rank.communicator->announce_failure(said);
  });
  CHECK_THAT(said, Catch::Contains("receive of 1F0 by channel 'a' from rank 0") &&
                       Catch::Contains("the milk is sour"));
}

TEST_CASE("what earlier steps have sent can be forgotten") {
  for (const Engine engine : kEngines) {
    bool fine = false;
    run_channels(2, {{0, 1, 4, "a"}}, engine, [&](ThreadRank& rank, TensorChannels& channels) {
      const bool sends = rank.where.rank == 0;
      for (int64_t i = 0; sends && i < 3; ++i) channels.sender(0)->send(numbered(i), "0F");
      rank.communicator->barrier("sent").wait();
      if (!sends) channels.forget_before(2);
      if (sends) channels.sender(0)->send({.step = 2, .micro_batch = 9}, "0F9");
      if (!sends) fine = take_message(channels, 0, 9, 2).tensors.empty();
    });
    CHECK(fine);
  }
}

TEST_CASE("a rank that goes is named to whoever waits for it") {
  for (const Engine engine : kEngines) {
    std::string said;
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          auto channels = make_channels(*rank.communicator, {{1, 0, 1, "back"}});
          if (rank.where.rank == 1) {
            rank.communicator->barrier("connected").wait();
            channels.reset();
            rank.communicator.reset();
            rank.group.reset();
            return;
          }
          rank.communicator->barrier("connected").wait();
          said = error_of([&] { channels->receiver(0)->receive(1, 0, "0B0"); });
        },
        kTimeout, engine);
    CHECK_THAT(said, Catch::Contains("receive of 0B0 by channel 'back' from rank 1"));
    if (engine == Engine::kShm) CHECK_THAT(said, Catch::Contains("ended normally"));
  }
}

TEST_CASE("on several hosts channels go through memory where they can") {
  std::vector<int64_t> wrong(4);
  const std::vector<ChannelRequest> requests{
      {0, 1, 2, "a"}, {1, 2, 2, "b"}, {2, 3, 2, "c"}, {3, 0, 2, "d"}, {2, 1, 1, "e"}};
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        const int64_t own = rank.where.rank;
        const auto group = make_shm_group(
            c10::make_intrusive<c10d::PrefixStore>("hosts", rank.store), rank.where,
            {.timeout = kTimeout, .hostname = "127.0.0.1", .host_partition = own < 2 ? "x" : "y"});
        const auto ranks = make_communicator(group, rank.store);
        const auto channels = make_channels(*ranks, requests);
        for (int64_t i = 0; i < 20; ++i) {
          for (size_t c = 0; c < requests.size(); ++c)
            if (auto* sender = channels->sender(c))
              sender->send(numbered(i, {at::full({3000}, double(i) + double(c))}), "F");
          for (size_t c = 0; c < requests.size(); ++c)
            if (channels->receiver(c))
              wrong[static_cast<size_t>(own)] +=
                  !at::equal(take_message(*channels, c, i).tensors[0],
                             at::full({3000}, double(i) + double(c)));
        }
        ranks->barrier("the end").wait();
      },
      kTimeout, Engine::kShm);
  CHECK(wrong == std::vector<int64_t>(4));
}

TEST_CASE("requests that are none, or differ between ranks, are refused on all ranks") {
  using Requests = std::vector<ChannelRequest>;
  const std::vector<std::pair<Requests, std::string>> cases{
      {{{0, 0, 1, "a"}}, "got a channel 'a' from rank 0 to rank 0 for 1 messages"},
      {{{0, 2, 1, "a"}}, "expected two ranks of the group"},
      {{{0, 1, 0, "a"}}, "for 0 messages"},
      {{{0, 1, 1, "a"}, {1, 0, 1, "a"}}, "got two channels 'a'"},
      {{{0, 1, 1, "a"}, {1, 0, 1, "own"}}, "rank 1 for a channel 'other'"}};
  for (const auto& [requests, expected] : cases) {
    std::vector<std::string> said(2);
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          Requests own = requests;
          if (own.back().name == "own" && rank.where.rank == 1) own.back().name = "other";
          try {
            make_channels(*rank.communicator, own);
          } catch (const c10::ValueError& error) {
            said[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
          }
        },
        kTimeout, Engine::kShm);
    for (const std::string& text : said) CHECK_THAT(text, Catch::Contains(expected));
  }
}

}  // namespace trireme::tensor_channel_test
