#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

// What is compared by a program in C++.
struct Side {
  const char* name;
  std::function<void()> call;
};

inline double time_us(const std::function<void()>& call, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return took.count() / calls;
}

// Runs all sides once per round, every other round in reversed order, and prints their times.
inline void measure(const std::vector<Side>& sides, int rounds, int calls) {
  std::vector<std::string> lists(sides.size());
  for (const Side& side : sides) time_us(side.call, std::min(calls, 100));
  for (int round = 0; round < rounds; ++round) {
    for (size_t turn = 0; turn < sides.size(); ++turn) {
      const size_t place = round % 2 == 0 ? turn : sides.size() - 1 - turn;
      lists[place] += (round == 0 ? "" : ", ") + std::to_string(time_us(sides[place].call, calls));
    }
  }
  std::string line;
  for (size_t i = 0; i < sides.size(); ++i)
    line += std::string(i == 0 ? "" : ", ") + "\"" + sides[i].name + "\": [" + lists[i] + "]";
  std::printf("{%s}\n", line.c_str());
}
