// SPDX-License-Identifier: Apache-2.0
// The link's flushes and messages: numbered on the way out, put in order on the way in.
#include <cstring>
#include <utility>

#include "link.h"
#include "reactor.h"
#include "writer.h"

namespace kvrail {

void Link::flush_for(std::shared_ptr<Writer> writer) { start_operation(true, std::move(writer), 0, {}); }

void Link::send_for(std::shared_ptr<Writer> writer, std::string message) {
  start_operation(false, std::move(writer), 0, std::move(message));
}

void Link::start_operation(bool is_flush, std::shared_ptr<Writer> writer, std::uint64_t token, std::string message) {
  Operation& operation = operations_.emplace_back();
  operation.link = this;
  operation.self = std::prev(operations_.end());
  operation.writer = std::move(writer);
  operation.is_flush = is_flush;
  operation.token = token;
  ++posted_;
  if (!endpoint_ || !usable()) return on_operation_done(&operation, UCS_ERR_NOT_CONNECTED);
  if (is_flush) return endpoint_->flush<on_operation_done>(&operation);
  operation.message = std::move(message);
  operation.header[0] = cookie_;
  operation.header[1] = next_number_++;
  ++stats().messages_sent;
  endpoint_->send<on_operation_done>(kMessageId, operation.header, sizeof operation.header, operation.message,
                                     &operation);
}

void Link::on_operation_done(void* user, ucs_status_t status) {
  auto& operation = *static_cast<Operation*>(user);
  Link& link = *operation.link;
  if (operation.writer) {
    if (operation.is_flush)
      operation.writer->flush_done(status);
    else
      operation.writer->send_done(status);
    link.schedule(operation.writer);
  } else if (operation.is_flush) {
    link.tell(EventKind::flushed, operation.token, status, {});
  }
  // Its number is taken: without it the peer would hold back every later message. Nearly always the endpoint has failed
  // and says so itself.
  if (!operation.is_flush && status != UCS_OK && link.error_ == UCS_OK && link.endpoint_ && link.usable())
    link.error_ = status;
  link.operations_.erase(operation.self);
}

ucs_status_t Link::on_message(void* arg, const void* header, std::size_t header_bytes, void* data, std::size_t nbytes,
                              const ucp_am_recv_param_t* param) {
  auto& link = *static_cast<Link*>(arg);
  std::uint64_t fields[2];
  if (header_bytes == sizeof fields) std::memcpy(fields, header, sizeof fields);
  if (header_bytes != sizeof fields || fields[0] != link.cookie_) {
    ++link.stats().messages_wrong_link;
    return UCS_OK;
  }
  // It may be a doorbell.
  if (link.reader_) link.reader_->see_frames();
  if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
    // We send eagerly; returning OK without receiving makes UCX drop it.
    link.error_ = UCS_ERR_UNSUPPORTED;
    return UCS_OK;
  }
  Ordered::Verdict verdict =
      link.inbox_.accept(fields[1], std::string(static_cast<const char*>(data), nbytes), [&link](std::string message) {
        ++link.stats().messages_received;
        link.tell(EventKind::message, 0, UCS_OK, std::move(message));
      });
  switch (verdict) {
    case Ordered::Verdict::delivered:
      break;
    case Ordered::Verdict::held:
      ++link.stats().messages_early;
      break;
    case Ordered::Verdict::duplicate:
      ++link.stats().messages_duplicate;
      break;
    case Ordered::Verdict::flood:
      link.error_ = UCS_ERR_EXCEEDS_LIMIT;
      break;
  }
  return UCS_OK;
}

}  // namespace kvrail
